"""Hybrid-parallel training of DLRM that counts, and saves, every byte on the network."""

__version__ = "0.1.0"
