"""The training loop, evaluation, what saves checkpoints, and how signals stop a run."""
