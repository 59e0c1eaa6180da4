"""A model's weights: found, read, identified, and run without the modules between."""
