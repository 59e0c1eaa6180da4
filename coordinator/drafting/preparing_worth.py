"""Whether preparing pays: tokens in a second of whole rounds with and without, by measurement.

Rounds include all costs and all gains: a hop that was saved, a target slowed down by a draft on the same cores, a call
that waited for a pass, drafts that were too few because nobody waited for more. Tokens are those to expect of the
drafts: what a few rounds really got is mostly luck. Groups of about one size share their measurements; those of another
size do what pays for these until they have measured it themselves. Knows nothing of calls.
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
"""Preparing pays if a token takes less than this share of its time without."""
PROBE_LOSS = 0.005
"""Share of the time that trials of the slower kind may lose."""
SLOW_BLOCKS = 2
"""First blocks of all, which count for nothing: services begin slowly."""
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
            search.add(now_s - last.began_s, last.tokens, prepares=last.prepares)
        prepares = search.next(self._usual())
        is_usual = is_decoding and last is not None and last.prepares is prepares
        begun = _Begun(search, prepares, now_s, is_usual, len(rows))
        self._last |= dict.fromkeys((row.sequence_id for row in rows), begun)
        return prepares

    def answered(self, rows: Sequence[ProposeRow], tokens: float) -> None:
        """Note how many tokens are to be expected of the drafts of a round that has begun."""
        if begun := self._last.get(rows[0].sequence_id):
            begun.tokens = tokens

    def _usual(self) -> bool | None:
        """Return what pays by the measurements of any group; None while nobody knows."""
        return next((one.pays for one in self._searches.values() if one.pays is not None), None)

    def forget(self, sequence_ids: Sequence[str]) -> None:
        for sequence_id in sequence_ids:
            self._last.pop(sequence_id, None)


@dataclass(slots=True)
class _Begun:
    """A round that has begun; its sequences share it."""

    search: "_Search"
    prepares: bool
    began_s: float
    is_usual: bool
    """Whether the round before was of the same kind, and no row of this one brings a prompt."""
    tokens: float
    """Tokens to expect of it."""


@dataclass(slots=True)
class _Mean:
    """Rounds of one kind: what they give and take."""

    tokens: float
    round_s: float
    count: int = 0

    def add(self, tokens: float, round_s: float) -> None:
        self.count += 1
        self.tokens = smoothed(self.tokens, tokens)
        self.round_s = smoothed(self.round_s, min(round_s, LONGEST * self.round_s))

    @property
    def token_s(self) -> float:
        return self.round_s / self.tokens


@dataclass(eq=False)
class _Search:
    """The search for the better kind of rounds, for groups of about one size."""

    _means: dict[bool, _Mean] = field(default_factory=dict)
    """By whether they prepare."""
    _prepares: bool = True
    _rounds_left: int = 0
    _blocks: int = 0
    """Blocks since the last trial."""
    _first_blocks: int = 0

    def add(self, round_s: float, tokens: float, *, prepares: bool) -> None:
        self._means.setdefault(prepares, _Mean(tokens, round_s)).add(tokens, round_s)

    @property
    def ratio(self) -> float | None:
        """Time of a token with preparing over its time without; None while it is not known."""
        is_slow = 0 < self._first_blocks <= SLOW_BLOCKS
        if is_slow or len(self._means) < 2 or any(one.count < BLOCK - 1 for one in self._means.values()):
            return None
        return self._means[True].token_s / self._means[False].token_s

    @property
    def pays(self) -> bool | None:
        return None if self.ratio is None else self.ratio < WORTHWHILE

    def next(self, usual: bool | None) -> bool:
        """Return whether the next round prepares; `usual` is what pays for other groups."""
        if not self._rounds_left:
            self._prepares = self._decide(usual)
            self._rounds_left = BLOCK
        self._rounds_left -= 1
        return self._prepares

    def _decide(self, usual: bool | None) -> bool:
        ratio = 1.0 if self.ratio is None else self.ratio
        pays = usual if self.pays is None else self.pays
        if pays is None:
            return self._first()
        self._blocks += 1
        if self._blocks > max(LEAST_PROBE_BLOCKS, abs(ratio - 1) / PROBE_LOSS):
            self._blocks = 0
            return not pays
        return pays

    def _first(self) -> bool:
        """Return each kind in turn."""
        if self._first_blocks == SLOW_BLOCKS:
            self._means.clear()
        self._first_blocks += 1
        return self._first_blocks % 2 == 1
