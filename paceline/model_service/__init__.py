"""The common part of the model services: their life, their metrics, and the one thread that works with the model."""
