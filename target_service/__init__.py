"""The target service: verifies draft tokens with the model whose output is wanted."""
