"""An average that forgets: what was measured long ago says little of now."""

SMOOTHING_MEMORY = 0.9
"""Weight of earlier values after one more."""


def smoothed(mean: float | None, value: float, memory: float = SMOOTHING_MEMORY) -> float:
    """The average after one more value; the value itself where there was none before."""
    return value if mean is None else memory * mean + (1 - memory) * value
