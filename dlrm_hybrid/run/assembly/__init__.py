"""From the configuration to the parts of a run; only `build` is free of torch."""
