"""Attention over what is cached: one file a layout, and one for strict results."""
