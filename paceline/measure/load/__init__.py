"""Load tests: requests sent at planned times, and what happened to them."""
