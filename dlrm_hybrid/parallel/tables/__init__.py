"""Embedding tables: who answers the lookups of a worker."""
