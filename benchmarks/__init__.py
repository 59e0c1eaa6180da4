"""Measurements behind the numbers in the README and the model card. They are run by hand; none is a test."""
