"""How much of the time trials may lose, as it grows: much at first, for little is known and some of it is wrong.

Later trials of counts may lose 0.8 % together and those of heads 0.5 %. Times are multiples of the costs' unit.
"""

YOUNG = 2000.0
"""Time in which trials may lose more."""
YOUNG_FACTOR = 2.0


def trial_share(share: float, spent: float) -> float:
    """Return the share of the time that trials may lose that may lose `share` in the end, after so much time."""
    return YOUNG_FACTOR * share if spent < YOUNG else share
