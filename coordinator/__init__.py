"""The coordinator: holds the sequence pool, forms groups, and runs their rounds over the two model services."""
