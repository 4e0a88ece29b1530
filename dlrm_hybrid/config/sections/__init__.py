"""Sections of the configuration that are none of a run's own; see `config.schema`."""
