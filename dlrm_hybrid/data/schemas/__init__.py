"""The schemas of the package, and how schemas are read."""
