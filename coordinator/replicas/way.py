"""Whether services are near: what of a round's time its calls spend on the way to them."""

from dataclasses import dataclass

from coordinator.smoothing import smoothed

FAR_SHARE = 0.4
"""Share of a round's time that the way takes where services are far."""
WAY_MEMORY = 0.8
LONGEST = 3
"""A round counts as at most this many mean rounds: a pause of the machine says nothing."""


@dataclass(slots=True)
class Way:
    """What the way takes of rounds, in seconds."""

    _wire_s: float | None = None
    _round_s: float | None = None

    def called(self, wire_s: float) -> None:
        self._wire_s = smoothed(self._wire_s, wire_s, WAY_MEMORY)

    def took(self, round_s: float) -> None:
        self._round_s = smoothed(self._round_s, usual_time(round_s, self._round_s), WAY_MEMORY)

    @property
    def share(self) -> float | None:
        """Share of a round's time that it takes; None while that is not known."""
        return None if self._wire_s is None or not self._round_s else self._wire_s / self._round_s

    @property
    def is_near(self) -> bool:
        """Whether it is known to be a small part."""
        return self.share is not None and self.share < FAR_SHARE

    @property
    def is_far(self) -> bool:
        """Whether it is known to be a large part."""
        return self.share is not None and self.share >= FAR_SHARE


def usual_time(round_s: float, mean_s: float | None) -> float:
    """Return a round's time as it counts beside the mean so far."""
    return round_s if mean_s is None else min(round_s, LONGEST * mean_s)
