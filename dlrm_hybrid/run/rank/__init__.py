"""One process of a run: its channel, its role, its resuming and its end."""
