"""Ranks: how processes that hold one model together talk, and what they tell each other."""
