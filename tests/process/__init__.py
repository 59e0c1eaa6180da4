"""Tests of a service as a process: settings, start, supervision, end."""
