"""Sinks of other people's trackers of experiments, which are imported where one is chosen."""
