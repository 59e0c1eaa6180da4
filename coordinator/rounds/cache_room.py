"""Whether one more generation finds room in a target's cache until it ends, as far as can be foreseen.

Owns what is known of the room there is and of how long outputs get. Nothing is held back until the target has refused
rows for want of room: what was cached then is the room there is, whatever others hold of it and prompts share. The
peak of what generations will want is foreseen from the lengths of outputs lately, as in the Past-Future scheduler (Gong
et al., arXiv 2507.10150).
"""

from collections import deque
from collections.abc import Iterable

from coordinator.requests.generation import Generation

REMEMBERED = 128
"""Outputs whose lengths are kept."""
RISE = 1.01
"""The room is taken for so much more with every output that ends without a shortage since the last: others may have
left."""


class CacheRoom:
    def __init__(self) -> None:
        self._token_count: float | None = None
        """None: enough, as far as is known."""
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)

    @property
    def is_scarce(self) -> bool:
        return self._token_count is not None

    def ran_short(self, cached: Iterable[Generation], free_count: int) -> None:
        """The target refused a row, with these generations in its cache, and room for so many tokens more."""
        self._token_count = max(1, sum(one.target_cached_length for one in cached) + max(0, free_count))

    def ended(self, generation: Generation) -> None:
        self._lengths.append(generation.output.count)
        if self._token_count is not None:
            self._token_count *= RISE

    def fits(self, candidate: Generation, live: Iterable[Generation], paused: Iterable[Generation]) -> bool:
        """Whether there is room for it beside the live ones until each of these ends, and for what paused ones keep."""
        if self._token_count is None:
            return True
        kept = sum(one.target_cached_length for one in paused if one is not candidate)
        wants = sorted(((self._remaining(one), len(one.token_ids)) for one in (candidate, *live)), reverse=True)
        return kept + _peak(wants) <= self._token_count

    def _remaining(self, generation: Generation) -> float:
        """Tokens it is expected to grow by: the mean of outputs that got longer than it is, within its own limit."""
        count, most = generation.output.count, generation.output.remaining_count
        longer = [length - count for length in self._lengths if length > count]
        return min(most, sum(longer) / len(longer)) if longer else most


def _peak(wants: list[tuple[float, int]]) -> float:
    """Return the most tokens that generations hold at once, of (tokens to come, tokens now), the longest to come first.

    All grow alike. When one ends that has r to come, those with more to come are there, and have grown by r.
    """
    peak, held = 0.0, 0
    for count, (remaining, length) in enumerate(wants, start=1):
        held += length
        peak = max(peak, held + count * remaining)
    return peak
