"""What one process of a run does: its channel, its part, how it resumes and how it ended."""
