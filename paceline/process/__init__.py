"""A process of ours: its settings, what it is watched with, how it starts, is supervised and ends."""
