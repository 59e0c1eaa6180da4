"""Tests of what the library shares with everybody."""
