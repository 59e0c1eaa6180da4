"""Tests of what a simulation is made of."""
