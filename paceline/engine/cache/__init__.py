"""Where keys and values lie: pages of one memory, or the paper's rectangle."""
