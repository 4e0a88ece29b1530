"""A run's saved model and preprocessing, for use without training."""
