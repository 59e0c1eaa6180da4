"""Bad input for every method of the three services: generating it, sending it, and judging the answers.

`python -m benchmarks.fuzz` and `tests/cluster/test_fuzz.py` drive it.
"""
