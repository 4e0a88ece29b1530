"""When versions of weights are made, and which of them a step is computed with."""
