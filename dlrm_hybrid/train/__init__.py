"""The training loop, evaluation, checkpointing, and how signals stop a run."""
