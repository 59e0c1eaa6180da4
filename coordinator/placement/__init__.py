"""Placement: which target serves which generation, and when a target is given up."""
