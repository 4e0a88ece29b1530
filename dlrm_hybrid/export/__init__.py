"""Exchange of models with other programs: exported files, and imported weights."""
