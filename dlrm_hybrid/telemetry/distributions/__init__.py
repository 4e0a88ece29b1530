"""Counts of what is measured once a step, or more often: mergeable, with quantiles."""
