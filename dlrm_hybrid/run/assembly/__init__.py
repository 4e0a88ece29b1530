"""Assembly of a run's parts from the configuration; only `build` is free of torch."""
