"""From raw Criteo rows to batches: parse, prepare, shards, loader, synthetic rows."""
