"""Schema, validation and composition of the configuration."""
