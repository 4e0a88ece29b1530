"""Collective rounds: the workers of a stage reduce through a server before each push."""
