"""An estimate of whether a target's cache has room for one more generation until it ends.

Owns the estimate of the room. Nothing is held back until the target refuses rows for lack of room. The tokens cached at
that moment are then the room, whatever other coordinators hold or prompts share. The peak demand is foreseen from the
lengths of recent outputs, as in the Past-Future scheduler (Gong et al., arXiv 2507.10150).
"""

from collections.abc import Iterable

from coordinator.requests.generation import Generation
from coordinator.rounds.output_lengths import OutputLengths

RISE = 1.01
"""Factor on the room with every output that ends while it is scarce: other coordinators may have freed some."""
QUIET = 64
"""Outputs that end without a shortage after which none is expected any more: what was measured while others held nearly
all of the cache would hold generations back for a thousand outputs after they are gone."""


class RoomEstimate:
    def __init__(self) -> None:
        self._token_count: float | None = None
        """The room in tokens; None: no shortage was seen yet, or none of late."""
        self._quiet_count = 0
        """Outputs that ended since the last shortage."""
        self._lengths = OutputLengths()

    @property
    def is_scarce(self) -> bool:
        return self._token_count is not None

    def ran_short(self, cached: Iterable[Generation], free_count: int) -> None:
        """Note that the target refused a row, with `cached` in its cache and room for `free_count` more tokens."""
        self._token_count = max(1, sum(one.target_cached_length for one in cached) + max(0, free_count))
        self._quiet_count = 0

    def ended(self, generation: Generation) -> None:
        self._lengths.ended(generation)
        if self._token_count is not None:
            self._quiet_count += 1
            self._token_count = RISE * self._token_count if self._quiet_count < QUIET else None

    def fits(self, candidate: Generation, live: Iterable[Generation], paused: Iterable[Generation]) -> bool:
        """Return whether the candidate fits beside live generations until they end and the caches of paused ones."""
        if self._token_count is None:
            return True
        kept = sum(one.target_cached_length for one in paused if one is not candidate)
        wants = sorted(((self._lengths.remaining(one), len(one.token_ids)) for one in (candidate, *live)), reverse=True)
        return kept + _peak(wants) <= self._token_count


def _peak(wants: list[tuple[float, int]]) -> float:
    """Return the most tokens held at once. `wants` has (tokens to come, tokens now), the most to come first.

    All generations grow equally fast. When one that had r tokens to come ends, those left have grown by r.
    """
    peak, held = 0.0, 0
    for count, (remaining, length) in enumerate(wants, start=1):
        held += length
        peak = max(peak, held + count * remaining)
    return peak
