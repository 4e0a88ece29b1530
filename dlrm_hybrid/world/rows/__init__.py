"""The rows of a world: a program's checked batches, and their loaders."""
