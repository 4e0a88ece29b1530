"""The training loop, evaluation, checkpoints and the supervisor of ranks."""
