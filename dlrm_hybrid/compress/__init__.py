"""Gradient and activation compressors."""
