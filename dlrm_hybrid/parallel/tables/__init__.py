"""Embedding tables: where a worker's lookups are answered."""
