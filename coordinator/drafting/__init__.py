"""Drafting: the draft replicas behind their circuits, as one drafter, drafts made ahead, and drafts looked up."""
