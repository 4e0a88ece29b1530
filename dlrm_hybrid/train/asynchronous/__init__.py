"""Asynchronous and elastic training: a leader gives batches to trainers, in which order."""
