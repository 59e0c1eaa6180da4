"""How much of the time trials may lose, as it grows: much at first, for little is known and some of it is wrong.

Later trials of counts may lose 0.6 % together and those of heads 0.4 %. Times are multiples of the costs' unit.
"""

YOUNG = 2500.0
"""Time in which trials may lose more."""
LATE_FACTOR = 0.375


def trial_share(share: float, spent: float) -> float:
    """Return the share of the time that trials may lose that may lose `share` at first, after so much time."""
    return share if spent < YOUNG else LATE_FACTOR * share
