"""Runs whose processes torchrun, SLURM or an operator of Kubernetes has started."""
