"""Tests; the files mirror the modules."""
