"""Requests, their generations, and the output that clients have not read yet.

Knows nothing of rounds, services or gRPC.
"""
