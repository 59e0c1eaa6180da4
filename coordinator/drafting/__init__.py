"""Drafting: draft replicas behind their circuits, by model; drafts that were prepared; and drafts looked up."""
