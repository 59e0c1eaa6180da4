"""`paceline run`: a file of prompts, and its answers as they come."""
