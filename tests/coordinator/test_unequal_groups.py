"""`auto` where groups of several sizes are in flight in two lanes, as with more requests than a group has room for.

The rounds of both lanes share a target, so each takes the time of both.
"""

import random
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from statistics import fmean

import pytest

from coordinator.replicas.way import Way
from coordinator.requests.committed_tokens import TokenList
from coordinator.requests.generation import Generation, HeadsDraft
from coordinator.requests.guess import Guess
from coordinator.rounds.auto_planner import AutoPlanner, _Search
from coordinator.rounds.costs import RoundWork
from coordinator.rounds.fixed_planner import FixedPlanner
from coordinator.rounds.outlook import Outlook
from coordinator.rounds.round_report import RoundReport, RowReport
from coordinator.rounds.wishes import DraftPlanner, Wish
from paceline.types import DraftSource, HopTime
from tests.fakes.draft_worlds import RIGHT, WRONG, group_of

LOADS = {
    "of ten requests that change places": [(8, 2), (6, 4), (7, 3)],
    "of eight and two": [(8, 2)],
    "that rises and falls": [(8, 8), (8, 2), (8, 4)],
}
"""Rows of both lanes' groups, as they take turns."""
HEADS, HEADS_CHANCE = 5, 0.7
COPIES_SHARE, COPIES_CHANCE = 0.3, 0.6
"""Share of rows that have a long copy, and the chance of each of its tokens."""
PASS_S, TOKEN_S = 0.002, 0.0001
ROUNDS, SETTLED = 1500, 750


class Copies:
    """A source that often has a long guess, and is seldom right for long."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def read(self, context: TokenList) -> None:
        pass

    def guess(self, context: TokenList, most: int) -> Guess | None:
        has_any = self._rng.random() < COPIES_SHARE
        return Guess(drawn(self._rng, most, COPIES_CHANCE), 1, (0.99,) * most) if has_any else None

    def ended(self, context: TokenList) -> None:
        pass


def drawn(rng: random.Random, count: int, chance: float) -> tuple[int, ...]:
    return tuple(RIGHT if rng.random() < chance else WRONG for _ in range(count))


def verified(one: Generation, wish: Wish, rng: random.Random) -> RowReport:
    """Return what a row brings, whose target's heads then draft what was wished for."""
    accepted = len([*takewhile(RIGHT.__eq__, wish.token_ids)])
    drafts = drawn(rng, wish.propose_count, HEADS_CHANCE)
    one.heads_draft = HeadsDraft(len(one.token_ids), drafts, len(drafts)) if drafts else None
    source = wish.source if wish.token_ids else None
    tokens = [RIGHT] * (accepted + 1)
    return RowReport(len(wish.token_ids), accepted, accepted + 1, source, "", one, tokens, one.heads_draft)


class Target:
    """Serves one round after another, each beside the latest ones of other lanes."""

    def __init__(self, planner: DraftPlanner, seed: int, way_s: float = 0.0) -> None:
        """A way that is longer than both passes hides the other lane's."""
        self._planner = planner
        self._way_s = way_s
        self._rng = random.Random(seed)
        self._passes_s: deque[float] = deque([0.0, 0.0], maxlen=2)
        """Of the latest rounds."""

    def round(self, group: Sequence[Generation], slowness: float = 1.0) -> tuple[int, float]:
        """Run a round, whose pass takes `slowness` times as long as alone; return its tokens and its own seconds."""
        wishes = self._planner.plan(group, {})
        rows = [verified(one, wish, self._rng) for one, wish in wishes.items()]
        pass_s = PASS_S + TOKEN_S * (len(rows) + sum(row.drafted_count for row in rows))
        self._passes_s.append(pass_s * slowness * self._rng.lognormvariate(0, 0.1))
        passes_s = self._passes_s[-1] if self._way_s else sum(self._passes_s)
        cycle_s, hop = self._way_s + passes_s, HopTime()
        heads_count = sum(wish.propose_count for wish in wishes.values())
        report = RoundReport(rows, cycle_s, hop, hop, None, None, heads_count=heads_count)
        self._planner.observe(wishes, report, cycle_s)
        return sum(row.committed_count for row in rows), cycle_s if self._way_s else self._passes_s[-1]


def tokens_per_s(planner: DraftPlanner, load: str, seed: int, *, copies: bool, way_s: float = 0.0) -> float:
    """Run rounds in two lanes by turns; return what the later ones give, in a second of their own."""
    target, rng, chance = Target(planner, seed, way_s), random.Random(f"{seed} load"), random.Random(f"{seed} copies")
    requests = group_of(16)
    for one in requests if copies else ():
        one.guessers = {DraftSource.SUFFIX: Copies(chance)}
    count, spent_s = 0, 0.0
    for number in range(ROUNDS):
        if number % 20 == 0:
            sizes = rng.choice(LOADS[load])
        first, rest = requests[: sizes[0]], requests[sizes[0] : sum(sizes)]
        tokens, own_s = target.round(rest if number % 2 else first)
        if number >= SETTLED:
            count += tokens
            spent_s += own_s
    return count / spent_s


@pytest.mark.parametrize("load", LOADS)
def test_what_drafts_cost_is_learned_from_the_rounds_of_all_sizes(load: str) -> None:
    """Each size had learned from its own rounds alone: one of six rows beside four takes as long as one of eight beside
    two, so drafts seemed to cost nothing, and long copies were verified that are seldom right."""
    seeds = range(3)
    best = max(
        fmean(tokens_per_s(FixedPlanner(count, count), load, seed, copies=False) for seed in seeds)
        for count in range(1, HEADS + 1)
    )
    assert fmean(tokens_per_s(AutoPlanner(2, HEADS), load, seed, copies=True) for seed in seeds) > 0.97 * best


def test_what_groups_beside_bring_counts_while_they_are_there() -> None:
    """What they take no longer counted when they were gone, and what they bring did for twenty rounds more."""
    search, outlooks = _Search(2), [Outlook(one, {}, {}, {}, 100) for one in group_of(8)]
    eight, two = RoundWork(8, committed_count=8), RoundWork(2, committed_count=2)
    for _ in range(50):
        search.observe([eight], [two], 0.003, count=0, is_decoding=True)
    assert search.promises(outlooks)[0].tokens == pytest.approx(10, abs=0.1)
    search.observe([eight, eight], [], 0.004, count=0, is_decoding=True)
    assert search.promises(outlooks)[0].tokens == 8


@pytest.mark.parametrize("count", [9, 10, 12])
def test_one_lane_runs_where_a_second_would_have_the_few_requests_that_are_left_over(count: int) -> None:
    """One lane always takes full groups, which pay better than some of eight beside some of two. What a group brings is
    not what its lane does: it was compared with itself in another lane, and a fifth to a third was lost."""
    for seed in range(3):
        planner = AutoPlanner(2, HEADS, chooses_lanes=True)
        target, waiting, lane_counts = Target(planner, seed), deque(group_of(count)), list[int]()
        for number in range(ROUNDS):
            lanes = planner.lane_count
            rows = min(8, len(waiting)) if lanes == 1 or number % 2 == 0 else count - 8
            group = [waiting.popleft() for _ in range(rows)]
            target.round(group, 1.1 if lanes == 2 else 1.0)
            waiting += group  # those that were served last wait longest
            lane_counts.append(lanes)
        assert fmean(lane_counts[SETTLED:]) < 1.2


def test_what_other_lanes_do_on_a_far_target_makes_no_draft_dearer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.TOKEN_S", 0.0003)
    way_s, load, seeds = 0.01, "of eight and two", range(1, 3)
    best = max(
        tokens_per_s(FixedPlanner(count, count), load, 1, copies=False, way_s=way_s) for count in range(1, HEADS + 1)
    )
    way = Way()
    way.called(way_s)
    way.took(way_s + PASS_S)
    found = [tokens_per_s(AutoPlanner(2, HEADS, way), load, seed, copies=False, way_s=way_s) for seed in seeds]
    assert fmean(found) > 0.98 * best
