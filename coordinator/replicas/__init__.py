"""The replicas of a service: where they are, whether they are well, what they run, and how they are called."""
