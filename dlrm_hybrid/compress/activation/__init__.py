"""Activations and their gradients between stages, as sections of frames."""
