"""Whether preparing pays: tokens in a second with and without, by measurement.

Times go from one round that asks for drafts to the next one, of whichever lane and rows. So they include all costs and
all gains: a hop that was saved, a target slowed down by a draft on the same cores, a call that waited for a pass,
drafts that were too few because nobody waited for more, rounds between that asked for none. Tokens are those to expect
of the drafts: what a few rounds really got is mostly luck. Groups of about one size share their measurements; those of
another size do what pays for these until they have measured it themselves.

Where the draft service is near and may compute on the target's cores or device, nothing is prepared nor measured:
preparing can save no more than the short way there, and each trial makes rounds longer. Knows nothing of what calls
bring.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.replicas.way import Way, usual_time
from coordinator.smoothing import smoothed
from paceline.types import CallTiming, ProposeRow

BLOCK = 8
"""Rounds in a row of one kind: what was prepared in one round shows in the next."""
WORTHWHILE = 0.99
"""Preparing pays if a token takes less than this share of its time without."""
PROBE_LOSS = 0.005
"""Share of the time that trials of the slower kind may lose."""
SLOW_BLOCKS = 2
"""First blocks of all, which count for nothing: services begin slowly."""
FIRST_GAP, GAP_GROWTH = 4, 4
"""Blocks until the first trial, and how much longer each gap is than the last one: what was measured first, while
services were still warming up, must not stand for long."""
LEAST_LAST_GAP = 32
"""Blocks from one trial to the next in the end, at least."""
KNOWN = BLOCK // 2
"""Rounds without prompts after which the time of a kind is known."""


@dataclass(frozen=True, eq=False)
class Begun:
    """A round that has begun."""

    search: "_Search"
    prepares: bool
    began_s: float
    is_usual: bool
    """Whether the round before was of the same kind, and no row of this one brings a prompt."""


class PreparingWorth:
    def __init__(self, has_room_beside_target: Callable[[], bool] = lambda: True) -> None:
        self._has_room = has_room_beside_target
        self._searches: dict[int, _Search] = {}
        self._way = Way()
        self._last: Begun | None = None
        self._prepares = True
        self._rounds_left = 0
        """Rounds of the block, whatever their sizes: kinds that alternate round by round would tell nothing."""

    def begin(self, rows: Sequence[ProposeRow], now_s: float) -> Begun:
        """Note that a round begins now with these rows. What is returned says whether to prepare for it."""
        search = self._searches.setdefault((len(rows) - 1).bit_length(), _Search())
        is_decoding = all(row.base_length for row in rows)
        if (last := self._last) and last.is_usual and is_decoding:
            last.search.took(now_s - last.began_s, prepares=last.prepares)
        if last and is_decoding:
            self._way.took(now_s - last.began_s)
        if not self._way.is_far and not self._has_room():
            self._prepares, self._rounds_left = False, 0
        else:
            if not self._rounds_left:
                self._prepares, self._rounds_left = search.decide(self._usual()), BLOCK
            self._rounds_left -= 1
        is_usual = is_decoding and last is not None and last.prepares is self._prepares
        self._last = Begun(search, self._prepares, now_s, is_usual)
        return self._last

    def answered(self, begun: Begun, tokens: float) -> None:
        """Note how many tokens are to be expected of the drafts of a round that has begun."""
        if begun.is_usual:
            begun.search.gave(tokens, prepares=begun.prepares)

    def called(self, rows: Sequence[ProposeRow], call_s: float, timing: CallTiming) -> None:
        """Note how long a call for these rows took, and what the service says of that time."""
        if all(row.base_length for row in rows):
            self._way.called(max(0.0, call_s - timing.queued_s - timing.executed_s))

    def _usual(self) -> bool | None:
        """Return what pays by the measurements of any group; None while nobody knows."""
        return next((one.pays for one in self._searches.values() if one.pays is not None), None)


@dataclass(slots=True)
class _Mean:
    """Rounds of one kind: what they give and take."""

    tokens: float | None = None
    round_s: float | None = None
    count: int = 0
    """Rounds that were timed."""

    def took(self, round_s: float) -> None:
        self.count += 1
        self.round_s = smoothed(self.round_s, usual_time(round_s, self.round_s))

    def gave(self, tokens: float) -> None:
        self.tokens = smoothed(self.tokens, tokens)

    @property
    def token_s(self) -> float | None:
        """Seconds of a token; None while it is not known."""
        if self.round_s is None or not self.tokens or self.count < KNOWN:
            return None
        return self.round_s / self.tokens


@dataclass(eq=False)
class _Search:
    """The search for the better kind of rounds, for groups of about one size."""

    pays: bool | None = None
    """What the last comparison said; None before."""
    _means: dict[bool, _Mean] = field(default_factory=lambda: {True: _Mean(), False: _Mean()})
    """By whether they prepare."""
    _blocks: int = 0
    """Blocks since the last trial."""
    _gap: float = FIRST_GAP
    _first_blocks: int = 0

    def took(self, round_s: float, *, prepares: bool) -> None:
        self._means[prepares].took(round_s)

    def gave(self, tokens: float, *, prepares: bool) -> None:
        self._means[prepares].gave(tokens)

    def decide(self, usual: bool | None) -> bool:
        """Return whether the next block prepares; `usual` is what pays for other groups."""
        loss = self._compared_loss()
        pays = usual if self.pays is None else self.pays
        if pays is None:
            return self._first()
        self._blocks += 1
        if self._blocks <= min(self._gap, max(LEAST_LAST_GAP, loss / PROBE_LOSS)):
            return pays
        self.pays, self._blocks, self._gap = pays, 0, GAP_GROWTH * self._gap
        if self._means[not pays].token_s is not None:
            self._means[not pays] = _Mean()  # measured anew: what was true a while ago may be so no more
        return not pays

    def _compared_loss(self) -> float:
        """Compare both kinds; return how much longer a token takes with the slower, 0 while that is not known."""
        is_slow = 0 < self._first_blocks <= SLOW_BLOCKS
        with_s, without_s = self._means[True].token_s, self._means[False].token_s
        if is_slow or with_s is None or without_s is None:
            return 0.0
        pays = with_s / without_s < WORTHWHILE
        if pays is not self.pays:
            self.pays, self._gap = pays, FIRST_GAP
        return max(with_s, without_s) / min(with_s, without_s) - 1

    def _first(self) -> bool:
        """Return each kind in turn."""
        if self._first_blocks == SLOW_BLOCKS:
            self._means = {True: _Mean(), False: _Mean()}
        self._first_blocks += 1
        return self._first_blocks % 2 == 1
