"""Overload: more requests than can be served, and requests made to delay others."""
