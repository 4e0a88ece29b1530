"""Integer levels and which elements have them, as symbols of an entropy coder, and back."""
