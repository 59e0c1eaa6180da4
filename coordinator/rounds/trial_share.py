"""How much of the time trials may lose, as it grows: much at first, for little is known and some of it is wrong.

Later all kinds of trials that one place has, of counts, of neighbours and of heads, lose about a hundredth together.
Times are multiples of the costs' unit.
"""

YOUNG = 2000.0
"""Time in which trials may lose more."""
YOUNG_FACTOR = 2.0


def trial_share(share: float, spent: float) -> float:
    """Return the share of the time that trials may lose that may lose `share` in the end, after so much time."""
    return YOUNG_FACTOR * share if spent < YOUNG else share
