"""Events, metrics, sinks and the summary of a run."""
