"""The caches of keys and values: pages of one memory, or the paper's rectangle."""
