"""Schemas that come with the package, and the reader of schema files."""
