"""Checkpoints: what a run folder holds of them, how they are written, committed and read."""
