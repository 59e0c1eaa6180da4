"""Tests of the modules that all services and clients share."""
