"""Rounds: the choice of groups and draft counts, the calls for a group, and their results.

Knows of services only what `coordinator.protocols` says, and how much of a round's time the way to them takes.
"""
