"""The automatic draft length, against rounds whose costs and acceptance are known: it comes to what pays best."""

import random
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.acceptance import PRIOR_WEIGHT, SHARED_MEMORY, Acceptance
from coordinator.draft_length import MAX_AUTO, AutoDraftLength, expected_tokens
from coordinator.output import Output, StopRules
from coordinator.round import RoundReport, RowReport
from coordinator.sequence import Sequence
from coordinator.stream import Stream
from paceline.types import HopTime, Usage

ROUNDS = 400
LIFE_ROUNDS = 10
"""Rounds between two ends of sequences."""
SETTLED_ROUNDS = 100
"""The last ones: what is chosen then is what a long-lived service chooses."""


@dataclass(frozen=True)
class World:
    """What a round takes, in seconds, and how often the draft is right."""

    acceptance: float
    hop_s: float
    draft_token_s: float
    verify_s: float
    verified_token_s: float

    def propose(self, draft_count: int, group_size: int) -> HopTime:
        executed_s = draft_count * (self.draft_token_s + self.draft_token_s / 10 * group_size)
        return HopTime(self.hop_s, 0.0, executed_s) if draft_count else HopTime()

    def verify(self, token_count: int) -> HopTime:
        return HopTime(self.hop_s, 0.0, self.verify_s + self.verified_token_s * token_count)

    def goodput(self, draft_count: int, group_size: int) -> float:
        took_s = self.propose(draft_count, group_size).total_s + self.verify(group_size * (draft_count + 1)).total_s
        return group_size * expected_tokens(self.acceptance, draft_count) / took_s


def group_of(count: int) -> list[Sequence]:
    output = Output(StopRules(max_new_tokens=9, end_token_ids=frozenset()), None)
    group = [Sequence(str(number), [1], output, 64, Usage(1), Stream()) for number in range(count)]
    for sequence in group:
        sequence.usage = Usage(1, round_count=1)  # its prompt is cached
        sequence.draft_cached_length = 1
    return group


def run_rounds(world: World, group: Rows[Sequence], seed: int) -> list[int]:
    """Return the draft counts of the rounds, the most that a row had."""
    return run_worlds([world] * ROUNDS, group, seed)


def run_worlds(worlds: Iterable[World], group: Rows[Sequence], seed: int) -> list[int]:
    """As above, each round in a world of its own. A sequence ends after some rounds, and one that knows what all had
    takes its place."""
    draft_length, rng, shared = AutoDraftLength(lanes=1), random.Random(seed), Acceptance(memory=SHARED_MEMORY)
    chosen = []
    for number, world in enumerate(worlds):
        if number % LIFE_ROUNDS == 0:
            group[number // LIFE_ROUNDS % len(group)].acceptance = Acceptance(shared.rate)
        counts = draft_length.choose(group)
        rows = []
        for sequence, count in zip(group, counts, strict=True):
            right = [rng.random() < world.acceptance for _ in range(count)]
            accepted = next((place for place, one in enumerate(right) if not one), count)
            sequence.acceptance.add(accepted, count)
            shared.add(accepted, count)
            rows.append(RowReport(count, accepted, accepted + 1))
        verified_count = len(group) + sum(counts)
        propose, verify = world.propose(max(counts), len(group)), world.verify(verified_count)
        report = RoundReport(rows, propose.total_s + verify.total_s, propose, verify, verified_count, None, None)
        draft_length.observe(counts, report)
        chosen.append(max(counts))
    return chosen


WORLDS = st.builds(
    World,
    acceptance=st.floats(0.3, 0.95),
    hop_s=st.floats(0.0001, 0.005),
    draft_token_s=st.floats(0.0002, 0.01),
    verify_s=st.floats(0.002, 0.05),
    verified_token_s=st.floats(0.00001, 0.001),
)


@settings(max_examples=60)
@given(world=WORLDS, group_size=st.integers(1, 8), seed=st.integers(0, 100))
def test_what_is_chosen_in_the_end_is_nearly_as_good_as_the_best_fixed_count(
    world: World, group_size: int, seed: int
) -> None:
    settled = run_rounds(world, group_of(group_size), seed)[-SETTLED_ROUNDS:]
    reached = sum(world.goodput(count, group_size) for count in settled) / len(settled)
    assert reached >= 0.8 * max(world.goodput(count, group_size) for count in range(MAX_AUTO + 1))


def test_a_draft_that_is_never_right_is_asked_no_more() -> None:
    world = World(acceptance=0, hop_s=0.001, draft_token_s=0.001, verify_s=0.01, verified_token_s=0.0002)
    settled = run_rounds(world, group_of(4), 1)[-SETTLED_ROUNDS:]
    assert sum(count > 0 for count in settled) <= SETTLED_ROUNDS / 20  # a look now and then whether that still holds


@pytest.mark.parametrize("group_size", [1, 8])
def test_a_draft_that_becomes_right_is_asked_again(group_size: int) -> None:
    bad = World(acceptance=0, hop_s=0.001, draft_token_s=0.001, verify_s=0.01, verified_token_s=0.0002)
    worlds = [bad] * 3000 + [replace(bad, acceptance=0.9)] * 2500
    chosen = run_worlds(worlds, group_of(group_size), 1)
    assert max(chosen[2800:3000]) <= 1
    assert min(chosen[-SETTLED_ROUNDS:]) >= 3


def test_rounds_with_prompts_teach_nothing() -> None:
    draft_length = AutoDraftLength(lanes=1)
    group = group_of(2)
    report = RoundReport([], 1.0, HopTime(0, 0, 0.5), HopTime(0, 0, 0.5), 200, None, None, is_decoding=False)
    draft_length.observe([4, 4], report)
    fresh = AutoDraftLength(lanes=1)
    assert draft_length.goodput(group, 4) == fresh.goodput(group, 4)


@given(prior=st.floats(0, 1), accepted=st.integers(0, 5))
def test_one_round_hardly_moves_what_others_made_likely_and_many_do(prior: float, accepted: int) -> None:
    acceptance = Acceptance(prior)
    acceptance.add(accepted, 5)
    assert abs(acceptance.rate - prior) <= 5 / (PRIOR_WEIGHT + 5) + 0.01
    for _ in range(200):
        acceptance.add(accepted, 5)
    own = accepted / min(accepted + 1, 5)
    assert abs(acceptance.rate - own) < 0.01
