"""Tests of all services together, exactness first."""
