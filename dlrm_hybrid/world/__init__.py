"""Worlds that a Python program drives: its own batches in, metrics and weights out."""
