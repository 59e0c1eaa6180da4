"""Measuring: throughput and equal outputs, beside other systems. Knows nothing of the command line."""
