"""The rows of a world: a program's batches, checked, and the loaders that they come from."""
