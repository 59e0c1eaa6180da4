"""The draft count of a round: a fixed count, or the count that pays best by measured times and acceptance.

Knows nothing of services. The objective is the goodput of SmartSpec (arXiv 2406.14066), expected tokens over seconds
for the group at hand, and drafting nothing is one of the choices. Tokens and seconds are measured, never derived from
the parts of a round.

`auto` decides every eighth round which count the next eight have. At first it takes a few counts in turn, to measure
each; later the best one by its measurements. It tries another count again, for eight rounds, when the loss of that
count's last trial is a small share of the time since. This bounds the cost of all trials, and counts that are nearly as
good are tried most. Groups of about one size share their measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from coordinator.requests.acceptance import PlaceAcceptance
from coordinator.requests.generation import Generation
from coordinator.rounds.prompt_times import PromptTimes
from coordinator.rounds.round import RoundReport
from coordinator.rounds.round_times import RoundTimes
from coordinator.rounds.smoothing import smoothed

MAX_AUTO = 12
HYSTERESIS = 0.01
"""Share of goodput that a change must promise to gain."""
WINDOW = 8
"""Least rounds of each lane with one count: groups change slowly, and no model works during a decision."""
BEST_MEMORY = 0.97
"""Weight of earlier rounds in the tokens and seconds of the best count, which trials are compared with."""
FIRST_COUNTS = (4, 0, 8, 2)
"""Counts measured first, at the beginning and after the time of a round has jumped."""
FIRST_WINDOWS = 12
"""Windows in which the first counts must be measured: a draft service that is away is not waited for."""
NONE_SHARE, NEAR_SHARE, FAR_SHARE = 0.01, 0.003, 0.0005
"""Share of all time that trials of a count may lose. NONE: drafting nothing, which may be a tenth better for another
text. NEAR: neighbours of the best, or the best drafting count while nothing is drafted. FAR: all others."""
NONE_WINDOWS = 3
"""Factor on the length of a trial of drafting nothing where prompts come: eight rounds may have no prompt, and the cost
of a prompt without drafts would never be learned."""

AUTO_LEEWAY = 4.0
"""`auto` asks a slow draft for fewer tokens by itself. It times whole rounds; their parts say too little to overrule
it. A trial may also take longer than its drafts are worth. So only an extremely slow draft service is at fault."""


class DraftLength(Protocol):
    @property
    def leeway(self) -> float:
        """Factor on the worth of drafts above which a slow draft service is at fault."""
        ...

    def choose(self, group: Sequence[Generation]) -> list[int]:
        """Return the draft count of each generation of the group."""
        ...

    def observe(self, draft_counts: Sequence[int], report: RoundReport, cycle_s: float) -> None:
        """Learn from a round that ran with `draft_counts`; `cycle_s` is its time since its rows were ready."""
        ...


@dataclass(frozen=True)
class FixedDraftLength:
    leeway: ClassVar[float] = 1.0
    count: int

    def choose(self, group: Sequence[Generation]) -> list[int]:
        return [self.count] * len(group)

    def observe(self, draft_counts: Sequence[int], report: RoundReport, cycle_s: float) -> None:
        pass


class AutoDraftLength:
    leeway = AUTO_LEEWAY

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._places = PlaceAcceptance(MAX_AUTO)
        self._searches: dict[int, _Search] = {}
        self._calm_rounds = self._promptless_rounds = 0
        """Rounds of any lane since one brought tokens that a service lacked, and since one brought a prompt."""

    def choose(self, group: Sequence[Generation]) -> list[int]:
        search = self._search(len(group))
        if not search.rounds_left:
            search.decide(self._expected_tokens(group))
        search.rounds_left -= 1
        return [min(search.count, generation.max_draft_count) for generation in group]

    def observe(self, draft_counts: Sequence[int], report: RoundReport, cycle_s: float) -> None:
        self._places.age()
        for row in report.rows:
            self._places.add(row.accepted_count, row.drafted_count)
        if report.prepared_count:
            return  # its time would say that drafts are free
        # Rows near their end have fewer drafts than chosen.
        count = min(max(draft_counts), report.verified_count - len(draft_counts))
        tokens = sum(row.committed_count for row in report.rows) / len(draft_counts)
        # A round that waited behind another lane's prompt ends after it.
        self._calm_rounds = self._calm_rounds + 1 if report.is_decoding else 0
        self._promptless_rounds = 0 if report.prompt_token_count else self._promptless_rounds + 1
        search = self._search(len(draft_counts))
        if self._promptless_rounds >= self._lanes:
            search.charge(count, cycle_s, tokens)
        prompt_tokens = report.prompt_token_count / len(draft_counts)
        search.observe(count, cycle_s, tokens, prompt_tokens, is_usual=self._calm_rounds >= self._lanes)

    def _search(self, group_size: int) -> "_Search":
        """Return the search shared by groups up to the same power of two."""
        return self._searches.setdefault((group_size - 1).bit_length(), _Search(self._lanes))

    def _expected_tokens(self, group: Sequence[Generation]) -> list[float]:
        """Return the expected tokens of a row of the group, for each draft count."""
        usual = self._places.rate
        rate = sum(generation.acceptance.rate(usual) for generation in group) / len(group)
        tokens = self._places.expected_tokens(rate / usual)
        limits = [min(generation.max_draft_count, MAX_AUTO) for generation in group]
        if min(limits) == MAX_AUTO:
            return tokens
        counts = range(max(limits) + 1)
        return [sum(tokens[min(count, limit)] for limit in limits) / len(group) for count in counts]


@dataclass
class _Trial:
    """Rounds with a count that is not the best."""

    ended_s: float = 0.0
    lost_s: float = 0.0


@dataclass
class _Search:
    """The search for the best draft count of groups of about one size."""

    lanes: int
    count: int = FIRST_COUNTS[0]
    """Draft count of the rounds now."""
    rounds_left: int = 0
    """Rounds before the next decision."""
    _best: int = FIRST_COUNTS[0]
    _best_tokens: float | None = None
    """Mean tokens of a row in a round with the best count; None before any."""
    _best_cycle_s: float | None = None
    _window_count: int = 0
    _spent_s: float = 0.0
    """Seconds of all rounds."""
    _times: RoundTimes = field(default_factory=RoundTimes)
    _prompts: PromptTimes = field(default_factory=PromptTimes)
    _trials: dict[int, _Trial] = field(default_factory=dict)
    _in_a_row: int = 0
    """Latest rounds in a row with the same count."""
    _last: int | None = None
    """Count of the latest round."""

    def observe(self, count: int, cycle_s: float, tokens: float, prompt_tokens: float, *, is_usual: bool) -> None:
        self._spent_s += cycle_s
        if self._times.level_s:
            beyond_s = 0.0 if is_usual else cycle_s - self._times.expected_s(count)
            self._prompts.add(drafted=count > 0, beyond_s=beyond_s, prompt_tokens=prompt_tokens, tokens=tokens)
        self._in_a_row = self._in_a_row + 1 if count == self._last else 1
        self._last = count
        # Until then rounds of other lanes may still have had another count.
        if is_usual and self._in_a_row >= self.lanes:
            self._times.add(count, cycle_s)

    def charge(self, count: int, cycle_s: float, tokens: float) -> None:
        """Charge a trial with the seconds that the round lost compared with the best count.

        Must not be called for rounds with prompts, which come with any count.
        """
        if count == self._best:
            self._best_tokens = smoothed(self._best_tokens, tokens, BEST_MEMORY)
            self._best_cycle_s = smoothed(self._best_cycle_s, cycle_s, BEST_MEMORY)
        elif count in self._trials and self._best_tokens and self._best_cycle_s:
            trial = self._trials[count]
            trial.lost_s += cycle_s - tokens / self._best_tokens * self._best_cycle_s
            trial.ended_s = self._spent_s

    def decide(self, tokens: list[float]) -> None:
        """Choose the count of the next rounds; `tokens` has the expected tokens of a row for each count."""
        self.rounds_left = WINDOW * self.lanes
        self._window_count += 1
        if self._window_count > FIRST_WINDOWS and self._times.has_jumped:
            self._times, self._window_count, self._trials = RoundTimes(), 1, {}
        took = self._times.predict(len(tokens) - 1)
        if self._window_count <= FIRST_WINDOWS and (missing := self._missing(tokens, took)):
            self.count = missing[0]
            return
        level_s = self._times.level_s or 1.0
        prompts = [self._prompts.token_s(drafted=count > 0) / level_s for count in range(len(tokens))]
        goodputs = [one / (time + one * prompt) for one, time, prompt in zip(tokens, took, prompts, strict=True)]
        self._best = _shortest_of_best(goodputs, self._best)
        self.count = self._due(goodputs)
        if not self.count and self._best and self._prompts.are_known:
            self.rounds_left *= NONE_WINDOWS

    def _missing(self, tokens: list[float], took: list[float]) -> list[int]:
        """Return the first counts that were not measured yet and that may be the best."""
        counts = [count for count in FIRST_COUNTS if count < len(tokens)]
        known = [count for count in counts if self._times.weight(count) >= WINDOW / 2]
        best = max((tokens[count] / took[count] for count in known), default=0.0)

        def may_be_best(count: int) -> bool:
            # More drafts take no less time than fewer.
            least = max((took[one] for one in known if one < count), default=0.0)
            return tokens[count] > best * least

        return [count for count in counts if count not in known and may_be_best(count)]

    def _due(self, goodputs: list[float]) -> int:
        """Return the count to try now; the best one if no trial is due."""
        best = self._best
        # If drafting does not pay, the best count that drafts.
        other = goodputs.index(max(goodputs[1:]), 1) if not best and len(goodputs) > 1 else best
        for count, goodput in enumerate(goodputs):
            if count == best:
                continue
            trial = self._trials.setdefault(count, _Trial(ended_s=self._spent_s))
            expected_s = WINDOW * self.lanes * self._times.level_s * max(1 - goodput / goodputs[best], HYSTERESIS)
            is_near = count == other or abs(count - best) == 1
            share = NONE_SHARE if not count else NEAR_SHARE if is_near else FAR_SHARE
            if share * (self._spent_s - trial.ended_s) > max(expected_s, trial.lost_s):
                trial.ended_s, trial.lost_s = self._spent_s, 0.0
                return count
        return best


def _shortest_of_best(goodputs: list[float], current: int) -> int:
    """Return the smallest count that is as good as the best: tokens not drafted cannot be wrong.

    Keep the current count if the found one is larger and hardly better.
    """
    best = next(count for count, one in enumerate(goodputs) if one >= max(goodputs) * (1 - HYSTERESIS))
    if current < len(goodputs) and best > current and goodputs[best] <= goodputs[current] * (1 + HYSTERESIS):
        return current
    return best
