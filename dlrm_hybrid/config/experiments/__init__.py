"""Experiments of a user's own: `conf=FOLDER`."""
