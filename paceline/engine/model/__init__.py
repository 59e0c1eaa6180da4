"""A model's weights: finding, reading and identifying them, and running a pass through them."""
