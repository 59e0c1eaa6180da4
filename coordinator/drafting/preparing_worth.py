"""Whether preparing pays: mean times of whole rounds with and without, by measurement.

Rounds include all costs and all gains: a hop that was saved, a target slowed down by a draft on the same cores, a call
that waited for a pass. Groups of about one size share their measurements. Knows nothing of calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.smoothing import smoothed
from paceline.types import ProposeRow

BLOCK = 8
"""Rounds in a row of one kind: what was prepared in one round shows in the next."""
LONGEST = 3
"""A round counts as at most this many mean rounds: a pause of the machine says nothing."""
WORTHWHILE = 0.99
"""Preparing pays if rounds with it take less than this share of the time of rounds without."""
PROBE_LOSS = 0.005
"""Share of the time that trials of the slower kind may lose."""
FIRST_BLOCKS = 4
"""Blocks before the first decision, of each kind in turn. The first two count for nothing: services begin slowly."""
LEAST_PROBE_BLOCKS = 32
"""Blocks from one trial to the next, at least."""


class PreparingWorth:
    def __init__(self) -> None:
        self._searches: dict[int, _Search] = {}
        self._last: dict[str, _Begun] = {}
        """The last rounds of sequences."""

    def choose(self, rows: Sequence[ProposeRow], now_s: float) -> bool:
        """Return whether to prepare for a round that begins now with these rows."""
        search = self._searches.setdefault((len(rows) - 1).bit_length(), _Search())
        last = next((one for row in rows if (one := self._last.get(row.sequence_id)) and one.search is search), None)
        is_decoding = all(row.base_length for row in rows)
        if last and last.is_usual and is_decoding:
            search.add(now_s - last.began_s, prepares=last.prepares)
        prepares = search.next()
        begun = _Begun(search, prepares, now_s, is_decoding and last is not None and last.prepares is prepares)
        self._last |= dict.fromkeys((row.sequence_id for row in rows), begun)
        return prepares

    def forget(self, sequence_ids: Sequence[str]) -> None:
        for sequence_id in sequence_ids:
            self._last.pop(sequence_id, None)


@dataclass(frozen=True, slots=True)
class _Begun:
    search: "_Search"
    prepares: bool
    began_s: float
    is_usual: bool
    """Whether the round before was of the same kind, and no row of this one brings a prompt."""


@dataclass(eq=False)
class _Search:
    """The search for the faster kind of rounds, for groups of about one size."""

    _means_s: dict[bool, float] = field(default_factory=dict)
    _prepares: bool = True
    _rounds_left: int = 0
    _blocks: int = 0
    """Blocks since the last trial."""
    _first_blocks: int = 0

    def add(self, round_s: float, *, prepares: bool) -> None:
        mean_s = self._means_s.get(prepares, round_s)
        self._means_s[prepares] = smoothed(mean_s, min(round_s, LONGEST * mean_s))

    def next(self) -> bool:
        """Return whether the next round prepares."""
        if not self._rounds_left:
            self._prepares = self._decide()
            self._rounds_left = BLOCK
        self._rounds_left -= 1
        return self._prepares

    def _decide(self) -> bool:
        if self._first_blocks < FIRST_BLOCKS or len(self._means_s) < 2:
            if self._first_blocks == FIRST_BLOCKS // 2:
                self._means_s.clear()
            self._first_blocks += 1
            return self._first_blocks % 2 == 1
        ratio = self._means_s[True] / self._means_s[False]
        pays = ratio < WORTHWHILE
        self._blocks += 1
        if self._blocks > max(LEAST_PROBE_BLOCKS, abs(ratio - 1) / PROBE_LOSS):
            self._blocks = 0
            return not pays
        return pays
