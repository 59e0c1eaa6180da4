"""How many draft tokens a round asks for: a fixed count, or what pays best by measured times and acceptance.

Owns the estimate of what a round costs and yields; knows nothing of services. The objective is the goodput of
SmartSpec (arXiv 2406.14066): expected tokens over expected seconds for this very group, drafting nothing included.
"""

from collections.abc import Sequence as Group
from dataclasses import dataclass
from typing import Protocol

from coordinator.regression import Regression
from coordinator.round import RoundReport
from coordinator.sequence import Sequence
from paceline.types import HopTime

MAX_AUTO = 12
HYSTERESIS = 0.01
"""A change must promise this much more goodput."""
PACE = 8
"""Rounds between reconsiderations: groups change slowly, and the arithmetic is time that no model works."""
FIRST_COUNTS = (4, 1, 6, 2, 0, 4)
"""Tried in the first rounds, so that times of several lengths are known."""
CATCH_UP_ROUNDS = 32
"""Rounds over which what the draft must catch up with, after rounds without it, is to pay off."""
FIRST_PROBE, LAST_PROBE = 32, 1024
"""Rounds between looks at one draft more or, where drafting does not pay, at one: doubled while they change nothing.
There a draft that is right halves them and is looked at again at once: it is all that tells of a better draft."""


class DraftLength(Protocol):
    def choose(self, group: Group[Sequence]) -> list[int]:
        """How many drafts each sequence of the group should have."""
        ...

    def observe(self, draft_counts: Group[int], report: RoundReport) -> None:
        """Learn what a round cost in which the rows were to have so many drafts."""
        ...


@dataclass(frozen=True)
class FixedDraftLength:
    count: int

    def choose(self, group: Group[Sequence]) -> list[int]:
        return [self.count] * len(group)

    def observe(self, draft_counts: Group[int], report: RoundReport) -> None:
        pass


class AutoDraftLength:
    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._rounds = 0
        self._current = FIRST_COUNTS[0]
        self._untried = list(reversed(FIRST_COUNTS))
        self._probe_interval = FIRST_PROBE
        self._next_probe = FIRST_PROBE
        # Seconds as functions of work: passes of the draft and rows in them; tokens of the target's one pass.
        self._propose = Regression(3)
        self._propose_executed = Regression(3)
        self._verify = Regression(2)
        self._verify_executed = Regression(2)

    def observe(self, draft_counts: Group[int], report: RoundReport) -> None:
        if not self._current and any(row.accepted_count for row in report.rows):
            self._probe_interval = max(FIRST_PROBE, self._probe_interval // 4)  # of what the probe doubled
            self._next_probe = self._rounds + 1
        if not report.is_decoding:
            return  # what a prompt costs depends on how much of it is cached
        if report.propose.executed_s and min(draft_counts) == max(draft_counts):
            work = _propose_work(len(draft_counts), draft_counts[0])
            self._propose.add(work, _own_s(report.propose))
            self._propose_executed.add(work, report.propose.executed_s)
        self._verify.add((1.0, report.verified_count), _own_s(report.verify))
        self._verify_executed.add((1.0, report.verified_count), report.verify.executed_s)

    def choose(self, group: Group[Sequence]) -> list[int]:
        self._rounds += 1
        if self._untried:
            # Only whole groups tell what drafts cost, and new ones have prompts under way.
            if all(sequence.usage.round_count for sequence in group):
                return [self._untried.pop()] * len(group)
            return [FIRST_COUNTS[0]] * len(group)
        if self._rounds % PACE == 0:
            self._reconsider(group)
        if self._rounds >= self._next_probe:
            self._next_probe = self._rounds + self._probe_interval
            self._probe_interval = min(2 * self._probe_interval, LAST_PROBE)
            return self._probe(group)
        return [self._current] * len(group)

    def _probe(self, group: Group[Sequence]) -> list[int]:
        """One draft more than now; from nothing, one draft for the sequence that its cache lags behind least."""
        if self._current:
            return [min(self._current + 1, MAX_AUTO)] * len(group)
        nearest = min(range(len(group)), key=lambda index: _stale_count(group[index]))
        return [int(index == nearest) for index in range(len(group))]

    def _reconsider(self, group: Group[Sequence]) -> None:
        goodputs = [self.goodput(group, count) for count in range(MAX_AUTO + 1)]
        # The shortest of those that are as good as the best: what is not drafted cannot be wrong.
        best = next(count for count, one in enumerate(goodputs) if one >= max(goodputs) * (1 - HYSTERESIS))
        if goodputs[best] > goodputs[self._current] * (1 + HYSTERESIS) or best < self._current:
            if best and not self._current:
                self._probe_interval = FIRST_PROBE
            self._current = best

    def goodput(self, group: Group[Sequence], draft_count: int) -> float:
        """Expected tokens a second when every row of the group gets `draft_count` drafts, or as many as it may."""
        counts = [min(draft_count, sequence.max_draft_count) for sequence in group]
        tokens = sum(
            expected_tokens(sequence.acceptance.rate, count) for sequence, count in zip(group, counts, strict=True)
        )
        round_s = self._round_s(len(group), max(counts), len(group) + sum(counts))
        if draft_count and not self._current:
            stale_count = sum(map(_stale_count, group))
            round_s += self._propose_executed.predict((0, 0, stale_count)) / CATCH_UP_ROUNDS
        return tokens / round_s

    def _round_s(self, group_size: int, draft_count: int, token_count: int) -> float:
        """Seconds from one round of a lane to the next of any lane: lanes overlap until a service is always busy."""
        verify_s = self._verify.predict((1.0, token_count))
        verify_executed_s = self._verify_executed.predict((1.0, token_count))
        propose_s = propose_executed_s = 0.0
        if draft_count:
            work = _propose_work(group_size, draft_count)
            propose_s, propose_executed_s = self._propose.predict(work), self._propose_executed.predict(work)
        return max(propose_executed_s, verify_executed_s, (propose_s + verify_s) / self._lanes, 1e-6)


def expected_tokens(acceptance: float, draft_count: int) -> float:
    """Tokens a round yields with k drafts, each accepted with one probability: (1 - a^(k+1)) / (1 - a).

    Leviathan, Kalman, Matias, arXiv 2211.17192, equation 1.
    """
    if acceptance >= 1:
        return float(draft_count + 1)
    return float((1 - acceptance ** (draft_count + 1)) / (1 - acceptance))


def _stale_count(sequence: Sequence) -> int:
    """Committed tokens that the draft service would have to catch up with."""
    return len(sequence.token_ids) - sequence.draft_cached_length


def _own_s(hop: HopTime) -> float:
    """What a call costs by itself: its wait in line is another round's doing."""
    return hop.wire_s + hop.executed_s


def _propose_work(group_size: int, draft_count: int) -> tuple[float, ...]:
    return 1.0, draft_count, draft_count * group_size
