"""What drafts of the target's heads are taken to be worth."""

import random

import pytest

from coordinator.drafting.heads_acceptance import PRIOR_RATE, HeadsAcceptance
from coordinator.requests.generation import HeadsDraft


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
