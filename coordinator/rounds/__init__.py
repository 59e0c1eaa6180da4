"""Rounds: which generations go together, how many drafts they ask for, and what comes of it.

Knows of services only what `coordinator.protocols` says.
"""
