"""Rules that find the magnitude from which elements are sent."""
