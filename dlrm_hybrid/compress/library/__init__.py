"""The compressors for people who have a trainer of their own; see `dlrm_hybrid.compress`."""
