"""A world of ranks that run their own programs, with costs in place of tensors."""
