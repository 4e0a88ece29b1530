"""Worlds driven by a Python program: batches in, metrics and weights out."""
