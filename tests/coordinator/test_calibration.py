"""What a guess is worth: learned for each class from what was committed, whether the guess was used or not."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.drafting.calibration import PRIOR_WEIGHT, Calibration
from coordinator.requests.guess import Guess

GUESSES = st.integers(0, 40).flatmap(
    lambda length: st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 1)), min_size=1, max_size=12).map(
        lambda tokens: Guess(tuple(one for one, _ in tokens), length, tuple(share for _, share in tokens))
    )
)
ONE = Guess((5,), 4, (1.0,))


@given(st.lists(st.tuples(GUESSES, st.lists(st.integers(0, 2), max_size=8)), max_size=20), GUESSES)
def test_chances_are_chances_and_fall_from_token_to_token(rounds: list[tuple[Guess, list[int]]], guess: Guess) -> None:
    calibration = Calibration()
    for guessed, committed in rounds:
        calibration.observe(guessed, committed)
    chances = calibration.chances(guess)
    assert len(chances) == len(guess.token_ids)
    assert all(0 <= later <= chance < 1 for chance, later in zip([0.999, *chances], chances, strict=False))


def test_at_first_a_longer_match_and_a_larger_share_are_worth_more() -> None:
    calibration = Calibration()
    by_length = [calibration.chances(Guess((5,), length, (1.0,)))[0] for length in range(30)]
    by_share = [calibration.chances(Guess((5,), 4, (share / 10,)))[0] for share in range(1, 11)]
    assert by_length == sorted(by_length)
    assert by_share == sorted(by_share)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_chance_becomes_the_share_of_right_tokens(rate: float) -> None:
    calibration, draw = Calibration(), random.Random(1)
    for _ in range(2000):
        calibration.observe(ONE, [5 if draw.random() < rate else 6])
    assert calibration.chances(ONE)[0] == pytest.approx(rate, abs=0.06)  # 500 tokens count: 2.7 standard deviations


def test_a_few_tokens_change_little_and_many_decide() -> None:
    few, many, at_first = Calibration(), Calibration(), Calibration().chances(ONE)[0]
    few.observe(ONE, [6])
    assert few.chances(ONE)[0] == pytest.approx(at_first, rel=1 / PRIOR_WEIGHT)
    for _ in range(200):
        many.observe(ONE, [6])
    assert many.chances(ONE)[0] < 0.1


def test_old_evidence_fades() -> None:
    calibration = Calibration()
    for _ in range(5000):
        calibration.observe(ONE, [5])
    for _ in range(1500):
        calibration.observe(ONE, [6])
    assert calibration.chances(ONE)[0] < 0.1


def test_tokens_after_a_wrong_one_and_after_the_committed_ones_tell_nothing() -> None:
    wrong_second, all_known = Calibration(), Calibration()
    guess, later = Guess((5, 6, 7), 0, (1.0, 1.0, 1.0)), Guess((7,), 2, (1.0,))
    wrong_second.observe(guess, [5, 9, 7])
    all_known.observe(guess, [5, 6])
    at_first = Calibration().chances(later)
    assert wrong_second.chances(later) == all_known.chances(later) == at_first


def test_classes_learn_apart() -> None:
    calibration, shared = Calibration(), Guess((5,), 4, (0.5,))
    for _ in range(100):
        calibration.observe(ONE, [6])
    assert calibration.chances(shared) == Calibration().chances(shared)
