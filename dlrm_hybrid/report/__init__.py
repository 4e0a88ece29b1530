"""Tables and pictures of runs, read from their folders."""
