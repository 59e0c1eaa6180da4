"""A service process: its settings and instruments, and how it starts, is supervised and ends."""
