"""Paceline: speculative decoding for large language models as three gRPC services."""

__version__ = "0.1.0"
