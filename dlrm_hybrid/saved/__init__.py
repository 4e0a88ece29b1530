"""What a run has left, to be used without training: its model and its vocabularies."""
