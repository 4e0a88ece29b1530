"""Rows of embedding tables that this program updates itself, and their optimizers."""
