"""Embedding rows that this program updates itself, and their optimizers."""
