"""What a simulation is made of: measured costs, the times that they foresee, a workload, a cluster and its results.

Runs nothing: `coordinator.simulation` does, because the rounds that it runs are the coordinator's own.
"""
