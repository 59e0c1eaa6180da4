"""Peers: systems of others, measured beside ours."""
