"""Rows of tables and their gradients as integer levels."""
