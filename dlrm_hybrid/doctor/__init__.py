"""What this machine is able to do, and what is wrong with it."""
