"""Sync policies: when versions of the weights are made, and which one a step computes with."""
