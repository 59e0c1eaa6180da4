"""Policies: which of the window's generations a round serves, and who waits for how long."""

import pytest

from coordinator.requests.generation import Generation
from coordinator.rounds.policies import Policy, make_policy
from coordinator.rounds.policies.exspec import PATIENCE
from paceline.types import PolicyName
from tests.generations import generation_of

WINDOW = 10


def waiting(*lengths: int) -> list[Generation]:
    """Return generations of so many tokens, in the order of their arrival."""
    found = [generation_of((5,) * one) for one in lengths]
    for arrival, one in enumerate(found):
        one.request.arrival = arrival
    return found


def served(policy: Policy, window: list[Generation], batch_size: int, round_count: int) -> list[list[Generation]]:
    """Return the groups of so many rounds, in each of which a group's generations go behind the others."""
    groups = []
    for _ in range(round_count):
        group = policy.select(window, batch_size).generations
        window = [*(one for one in window if one not in group), *group]
        groups.append(group)
    return groups


@pytest.mark.parametrize(("name", "count"), [("continuous", 8), ("eqspec", 4), ("exspec", WINDOW)])
def test_as_many_are_live_as_a_policy_chooses_among(name: PolicyName, count: int) -> None:
    assert make_policy(name, WINDOW).live_limit(4, lanes=2) == count


def test_continuous_serves_whatever_is_ready_in_turn() -> None:
    window = waiting(5, 9, 7)
    groups = served(make_policy("continuous", WINDOW), window, 2, 3)
    first, second, third = window
    assert groups == [[first, second], [third, first], [second, third]]


def test_eqspec_runs_a_batch_to_its_end_and_leaves_the_places_of_the_ended_empty() -> None:
    policy, (first, second, third, fourth) = make_policy("eqspec", WINDOW), waiting(5, 9, 7, 5)
    assert policy.select([fourth, second, first, third], 2).generations == [first, second]
    assert policy.select([third, fourth, second], 2).generations == [second]
    assert policy.select([fourth, third], 2).generations == [third, fourth]


def test_exspec_serves_rows_of_one_length_that_fill_half_of_the_batch() -> None:
    policy, window = make_policy("exspec", WINDOW), waiting(5, 9, 7, 9, 8, 6)
    selection = policy.select(window, 4)
    assert selection.generations == [window[1], window[3]]
    assert not selection.is_fallback


def test_exspec_falls_back_to_those_that_wait_longest() -> None:
    policy, window = make_policy("exspec", WINDOW), waiting(5, 9, 7, 9, 8, 6)
    selection = policy.select(window, 6)
    assert selection.generations == window
    assert selection.is_fallback


def test_nobody_starves_under_exspec_beside_many_of_one_length() -> None:
    """The published algorithm serves the largest group for as long as there is one."""
    window = [*waiting(9), *waiting(*[5] * 9)]
    groups = served(make_policy("exspec", WINDOW), window, 3, 40)
    rounds = [number for number, group in enumerate(groups) if window[0] in group]
    most = PATIENCE * -(-len(window) // 3)
    assert rounds[0] <= most
    assert all(later - earlier <= most for earlier, later in zip(rounds, rounds[1:], strict=False))
    assert not make_policy("exspec", WINDOW).select(window, 3).is_fallback
