"""Measurements: throughput and equality of outputs, beside other systems. They know nothing of the command line."""
