"""What drafts of the target's heads are taken to be worth."""

import random
from collections.abc import Sequence

import pytest

from coordinator.drafting.calibration import CONFIRMED_CHANCE
from coordinator.drafting.heads_acceptance import PRIOR_RATE, HeadsAcceptance
from coordinator.requests.generation import HeadsDraft
from coordinator.requests.guess import Guess
from coordinator.rounds.acceptances import Acceptances
from paceline.types import DraftSource

DRAFTED = (5, 6, 7)


def test_each_place_has_its_own_chance() -> None:
    heads, draw = HeadsAcceptance(3), random.Random(1)
    for _ in range(500):
        heads.observe([1, 1, 1], [1, 1 if draw.random() < 0.5 else 2, 1, 1])
        heads.age()
    first, second, third = heads.chances()
    assert first > 0.95
    assert second == pytest.approx(0.5, abs=0.08)
    assert third == pytest.approx(second, abs=0.05)


def test_tokens_after_a_wrong_one_and_after_the_last_committed_one_tell_nothing() -> None:
    heads, all_known = HeadsAcceptance(3), HeadsAcceptance(3)
    heads.observe([1, 1, 1], [1])
    all_known.observe([1, 2, 2], [1, 1, 1])
    later = [one / before for before, one in zip(heads.chances(), heads.chances()[1:], strict=False)]
    assert later == pytest.approx([heads.chances()[0]] * 2)  # as the place before
    assert all_known.chances()[1] / all_known.chances()[0] < PRIOR_RATE


def test_what_they_do_not_give_is_not_expected() -> None:
    heads = HeadsAcceptance(3)
    for _ in range(100):
        heads.take_in(HeadsDraft(10, (), asked_count=3))
        heads.take_in(HeadsDraft(10, (), asked_count=0))  # nothing was asked for
    assert max(heads.expected_chances()) < 0.01
    assert heads.chances()[0] == PRIOR_RATE


def chances_beside(*token_ids: int) -> Sequence[float]:
    """Return the chances of `DRAFTED` beside a copy of these tokens."""
    guesses = {DraftSource.HEADS: Guess(DRAFTED, 0, (1.0,) * 3)}
    if token_ids:
        guesses[DraftSource.SUFFIX] = Guess(token_ids, 9, (1.0,) * len(token_ids))
    return Acceptances(0, len(DRAFTED)).of_guesses(guesses)[DraftSource.HEADS]


def test_tokens_that_a_copy_has_too_are_likelier_and_so_are_those_after_them() -> None:
    """A copy that the heads' draft goes on from was taken in its place, for it alone was known to be likely."""
    alone = chances_beside()
    assert chances_beside(8, 6, 7) == alone
    confirmed = chances_beside(*DRAFTED[:2])
    assert [*confirmed[:2]] == pytest.approx([CONFIRMED_CHANCE, CONFIRMED_CHANCE**2])
    assert confirmed[2] / confirmed[1] == pytest.approx(alone[2] / alone[1])


def test_a_copy_makes_no_token_less_likely() -> None:
    heads = Acceptances(0, len(DRAFTED))
    guesses = {DraftSource.HEADS: Guess(DRAFTED, 0, (1.0,) * 3), DraftSource.SUFFIX: Guess(DRAFTED, 0, (0.3,) * 3)}
    for _ in range(200):
        heads._observe(guesses, DRAFTED)
    alone = heads.of_guesses({DraftSource.HEADS: guesses[DraftSource.HEADS]})[DraftSource.HEADS]
    beside = heads.of_guesses(guesses)[DraftSource.HEADS]
    assert all(one >= other for one, other in zip(beside, alone, strict=True))
