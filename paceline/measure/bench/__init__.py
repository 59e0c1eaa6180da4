"""Throughput of many systems side by side, and the reports about it."""
