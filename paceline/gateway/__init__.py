"""OpenAI's HTTP for the clients of coordinators. It speaks to them through `paceline.client` alone."""
