"""Heads inside the target, beside the figures of Clover's paper: see `__main__`."""
