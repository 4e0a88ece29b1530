"""A module for each verb, whose `run` takes the request and returns the exit code."""
