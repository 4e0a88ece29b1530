"""What each command does: `run` takes its request and returns an exit code."""
