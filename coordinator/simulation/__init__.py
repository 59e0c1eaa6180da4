"""A coordinator in simulated time: its own placement, rounds and choice of drafts, over services that only wait.

Knows nothing of gRPC, threads and the clock on the wall.
"""
