"""What stands in tests where a model, a network, a clock or a peer is."""
