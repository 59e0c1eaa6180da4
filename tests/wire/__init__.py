"""Tests of what goes over the wire, and of the client."""
