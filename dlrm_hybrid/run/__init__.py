"""A run as processes: how they are started, what each is, and what ends them."""
