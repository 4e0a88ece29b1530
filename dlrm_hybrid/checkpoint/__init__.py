"""Checkpoints: their layout in a run folder, and how they are written, committed and read."""
