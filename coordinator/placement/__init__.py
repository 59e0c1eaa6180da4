"""Which target serves which generation, and when one is given up. What waits is bound to none."""
