"""Tests; a folder for each room, and `fakes`."""
