"""`auto` where groups of several sizes are in flight in two lanes, as with more requests than a group has room for.

The rounds of both lanes share a target, so each takes the time of both.
"""

import random
from itertools import takewhile
from statistics import fmean

import pytest

from coordinator.requests.committed_tokens import TokenList
from coordinator.requests.generation import Generation, HeadsDraft
from coordinator.requests.guess import Guess
from coordinator.rounds.auto_planner import AutoPlanner
from coordinator.rounds.fixed_planner import FixedPlanner
from coordinator.rounds.round_report import RoundReport, RowReport
from coordinator.rounds.wishes import DraftPlanner, Wish
from paceline.types import DraftSource, HopTime
from tests.fakes.draft_worlds import RIGHT, WRONG, group_of

LOADS = {"that change": [(8, 2), (6, 4), (7, 3)], "of eight and two": [(8, 2)]}
"""Rows of both lanes' groups, as they take turns: ten requests."""
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


def tokens_per_s(planner: DraftPlanner, load: str, seed: int, *, copies: bool) -> float:
    """Run rounds in two lanes by turns, each beside the latest one of the other; return what the later ones give."""
    rng = random.Random(seed)
    rows_at_hand = group_of(10)
    for one in rows_at_hand if copies else ():
        one.guessers = {DraftSource.SUFFIX: Copies(rng)}
    passes_s, sizes = [0.0, 0.0], LOADS[load][0]
    count, spent_s = 0, 0.0
    for number in range(ROUNDS):
        if number % 20 == 0:
            sizes = rng.choice(LOADS[load])
        lane = number % 2
        group = rows_at_hand[sizes[0] :] if lane else rows_at_hand[: sizes[0]]
        wishes = planner.plan(group, {})
        rows = [verified(one, wish, rng) for one, wish in wishes.items()]
        passes_s[lane] = PASS_S + TOKEN_S * (len(rows) + sum(row.drafted_count for row in rows))
        took_s = sum(passes_s) * rng.lognormvariate(0, 0.1)
        heads_count = sum(wish.propose_count for wish in wishes.values())
        hop = HopTime()
        planner.observe(wishes, RoundReport(rows, took_s, hop, hop, None, None, heads_count=heads_count), took_s)
        if number >= SETTLED:
            count += sum(row.committed_count for row in rows)
            spent_s += took_s / 2
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
    assert fmean(tokens_per_s(AutoPlanner(2, HEADS), load, seed, copies=True) for seed in seeds) > 0.975 * best
