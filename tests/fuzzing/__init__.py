"""Bad input for every method of the three services: what to send, sending it, and judging what comes back.

`python -m benchmarks.fuzz` and `tests/cluster/test_fuzz.py` drive it.
"""
