"""Exchanges between trainers that share tables."""
