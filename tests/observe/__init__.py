"""Tests of logs, metrics and spans."""
