"""Trainers, stages and parameter servers."""
