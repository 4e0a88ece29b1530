"""Frames and encodings: bytes that describe themselves, never pickled."""
