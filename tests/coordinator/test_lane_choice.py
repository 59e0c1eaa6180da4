"""The choice of the number of lanes, by given times."""

from collections.abc import Mapping

from coordinator.rounds.lane_choice import LaneChoice

WINDOW = 16
"""Rounds between two decisions."""


def lanes_after(choice: LaneChoice, token_s: Mapping[int, float], windows: int) -> list[int]:
    """Return the lanes in each window, whose rounds take what their tokens take."""
    found = []
    for _ in range(windows):
        if choice.is_due():
            choice.decide(token_s)
        found.append(choice.count)
        for _ in range(WINDOW):
            choice.passed(token_s[choice.count])
    return found


def test_what_is_in_use_is_measured_before_another_is_tried() -> None:
    choice = LaneChoice(2, is_free=True)
    choice.decide({})
    assert choice.count == 2
    choice.decide({2: 1.0})
    assert choice.count == 1
    choice.decide({2: 1.0})
    assert choice.count == 1
    choice.decide({2: 1.0, 1: 2.0})
    assert choice.count == 2


def test_the_better_is_kept_and_trials_of_the_other_lose_less_than_a_hundredth() -> None:
    choice = LaneChoice(2, is_free=True)
    choice.decide({2: 1.0})
    lanes = lanes_after(choice, {1: 1.0, 2: 1.3}, 2000)
    assert 0 < 0.3 * lanes.count(2) < 0.01 * len(lanes)


def test_a_trial_takes_two_windows_and_no_decision_until_then() -> None:
    choice = LaneChoice(2, is_free=True)
    choice.decide({2: 1.0})
    lanes = "".join(map(str, lanes_after(choice, {1: 1.0, 2: 1.3}, 2000)))
    assert set(lanes.split("1")) - {""} == {"22"}


def test_what_was_asked_for_is_never_due() -> None:
    choice = LaneChoice(2, is_free=False)
    assert not any(choice.is_due() for _ in range(100))


def test_a_small_difference_changes_nothing() -> None:
    choice = LaneChoice(2, is_free=True)
    choice.decide({2: 1.0})
    for _ in range(WINDOW):
        choice.passed(1.0)
    lanes_after(choice, {1: 1.0, 2: 1.3}, 2)
    choice.decide({1: 1.04, 2: 1.0})
    assert choice.count == 1
    choice.decide({1: 1.1, 2: 1.0})
    assert choice.count == 2


def test_rounds_that_began_before_a_change_count_for_neither() -> None:
    choice = LaneChoice(2, is_free=True)
    assert choice.passed(1.0)
    choice.decide({2: 1.0})
    assert [choice.passed(1.0) for _ in range(5)] == [False] * 4 + [True]
