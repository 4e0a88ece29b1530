"""Asynchronous and elastic training: a leader, its followers and the order of batches."""
