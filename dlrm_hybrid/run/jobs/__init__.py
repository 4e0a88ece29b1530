"""Runs in processes of their own, beside each other: the jobs of a sweep, or of a tuner."""
