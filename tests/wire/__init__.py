"""Tests of the wire and of the client."""
