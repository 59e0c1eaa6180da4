"""Stand-ins for models, networks, clocks and peers."""
