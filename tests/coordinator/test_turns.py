"""The time that planners learn from: the same whether groups take turns, run side by side, or one is left."""

import pytest

from coordinator.rounds.turns import Turns


def seconds(*rounds: tuple[float, float]) -> list[float]:
    """What two lanes are told of rounds that were ready and ended at these times."""
    turns = Turns(2)
    return [turns.ended(end_s, end_s - ready_s) for ready_s, end_s in rounds]


def test_two_groups_that_take_turns_and_one_that_is_left_have_equal_rounds() -> None:
    in_turn = seconds((10, 11), (10, 12), (11, 13), (12, 14))
    alone = seconds((10, 11), (11, 12), (12, 13), (13, 14))
    assert in_turn == alone == pytest.approx([2, 2, 2, 2])


def test_rounds_side_by_side_share_their_time() -> None:
    """Each is ready when it ended, and takes 3 s; one of them ends each 1 s or 2 s."""
    assert seconds((0, 3), (1, 4), (3, 6), (4, 7), (6, 9))[2:] == pytest.approx([3, 3, 3])


def test_time_without_rows_is_not_counted() -> None:
    assert seconds((0, 1), (1, 2), (100, 101), (101, 102)) == pytest.approx([2, 2, 2, 2])
