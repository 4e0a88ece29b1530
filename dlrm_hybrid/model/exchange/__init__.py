"""What trainers that share tables send each other."""
