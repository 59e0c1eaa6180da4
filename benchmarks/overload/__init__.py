"""Overload: more requests than can be served, and requests that are made to hold others up."""
