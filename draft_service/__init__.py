"""The draft service: proposes tokens with a small model."""
