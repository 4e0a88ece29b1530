"""Predicts how fast a world would train, from what a run has cost; free of torch."""
