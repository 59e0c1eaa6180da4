"""An average that forgets: what was measured long ago says little of now."""

MEMORY = 0.9
"""Weight of earlier values after one more."""


def smoothed(mean: float | None, value: float, memory: float = MEMORY) -> float:
    """The average after one more value; the value itself where there was none before."""
    return value if mean is None else memory * mean + (1 - memory) * value
