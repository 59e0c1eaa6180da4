"""Simulated clusters beside real ones: how far `paceline simulate` is from what the same requests took."""
