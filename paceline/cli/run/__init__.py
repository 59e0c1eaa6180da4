"""The command `paceline run` and the file of its partial outputs."""
