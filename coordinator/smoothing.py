"""An average that forgets: old measurements say little about the present."""

SMOOTHING_MEMORY = 0.9
"""Weight of earlier values after one more."""


def smoothed(mean: float | None, value: float, memory: float = SMOOTHING_MEMORY) -> float:
    """Return the average after one more value; `mean` None stands for no value before."""
    return value if mean is None else memory * mean + (1 - memory) * value
