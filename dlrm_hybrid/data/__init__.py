"""Data pipeline from raw rows of Criteo or any table to batches of a trainer."""
