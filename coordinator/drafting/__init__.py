"""Drafting: the draft replicas behind their circuits, as one drafter, and drafts that were prepared."""
