"""The coordinator: holds the generation pool, forms groups, and runs their rounds over the two model services."""
