"""Requests that come when they are due, and how they fared."""
