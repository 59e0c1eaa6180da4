"""Tests of the model engine: caches, attention, passes, choices."""
