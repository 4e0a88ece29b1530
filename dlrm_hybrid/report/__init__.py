"""Tables and plots from finished runs."""
