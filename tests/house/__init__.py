"""Tests of the project itself: what its pages name, who imports what, what its tests draw."""
