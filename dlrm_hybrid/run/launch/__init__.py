"""Runs whose processes torchrun, SLURM or a Kubernetes operator has started."""
