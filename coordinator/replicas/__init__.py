"""The replicas of a model service: their addresses, their states, their models, and the calls to them."""
