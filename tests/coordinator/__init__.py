"""Tests of the coordinator's rooms, over fake model services."""
