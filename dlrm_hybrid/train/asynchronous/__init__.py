"""Trainers that do not wait for each other: who leads, who follows, and in which order."""
