"""Tests of benchmarks and other measurements."""
