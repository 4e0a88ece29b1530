"""Runs in separate processes, several at a time: the jobs of a sweep, or of a tuner."""
