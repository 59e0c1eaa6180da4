"""A cluster of processes under mixed load while its services are killed and paused: every output must stay right.

`cluster` runs the processes, `requests` makes requests and their right outputs, `clients` sends them, `faults`
disturbs, `samples` watches for leaks, `report` judges. `scripts/chaos` runs it on replicas over mutual TLS.
"""
