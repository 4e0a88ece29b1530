"""Predicts how fast a world would train, from the measured costs of a run; free of torch."""
