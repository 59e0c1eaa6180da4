"""A cluster of processes under mixed load while its services are killed and paused: every output must stay right.

`cluster` runs the processes, `requests` says what is asked and what is right, `clients` ask, `faults` disturb,
`samples` watch what could leak, `report` judges. `scripts/chaos` runs it on replicas over mutual TLS.
"""
