"""The time that planners learn from: the same whether groups take turns in one lane or one is left."""

import pytest

from coordinator.rounds.turn_times import TurnTimes


def seconds(*rounds: tuple[float, float]) -> list[float]:
    """What two lanes are told of rounds that were ready and ended at these times."""
    turns = TurnTimes(2)
    return [turns.ended(end_s, end_s - ready_s) for ready_s, end_s in rounds]


def test_two_groups_that_take_turns_and_one_that_is_left_have_equal_rounds() -> None:
    in_turn = seconds((10, 11), (10, 12), (11, 13), (12, 14))
    alone = seconds((10, 11), (11, 12), (12, 13), (13, 14))
    assert in_turn == alone == pytest.approx([2, 2, 2, 2])


def test_work_for_other_coordinators_is_no_part_of_a_round() -> None:
    """Two groups in turn take 1 s each, and others 3 s amid each round."""
    turns = TurnTimes(2)
    assert [turns.ended(end_s, 1 if end_s == 4 else 5, 3) for end_s in (4, 8, 12)] == pytest.approx([2, 2, 2])


def test_time_without_rows_is_not_counted() -> None:
    assert seconds((0, 1), (1, 2), (100, 101), (101, 102)) == pytest.approx([2, 2, 2, 2])
