"""From raw rows of Criteo or any table to batches: sources, prepare, shards, loader."""
