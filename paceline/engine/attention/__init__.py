"""Attention over cached keys and values, by cache layout, and `strict` for results that are equal to the last bit."""
