"""A run as processes: who starts them, who they are, what ends them."""
