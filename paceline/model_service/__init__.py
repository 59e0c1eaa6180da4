"""What draft and target services share: their life, their metrics, and the one thread that works with the model."""
