"""Tests of the project itself: names in its pages, imports, and the examples that its tests draw."""
