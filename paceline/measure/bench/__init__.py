"""Throughput of many systems side by side, and what is told of it."""
