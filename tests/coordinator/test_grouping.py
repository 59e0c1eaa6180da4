"""How groups are formed where a target works for several coordinators."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from coordinator.replicas import way
from coordinator.rounds.draft_worth import DraftWorth
from coordinator.rounds.fixed_planner import FixedPlanner
from coordinator.rounds.grouping import ROUNDS, Grouping, Groups
from coordinator.rounds.turn_times import TurnTimes
from paceline.checks import MAX_ROWS
from paceline.errors import InvalidRequest, PeerUnavailable
from paceline.types import CallTiming, Verdicts, VerifyRow
from tests.coordinators import dispatching, generate_all, prompts, scheduling
from tests.fakes.dispatches import output, submit, whole
from tests.fakes.model_services import FakeDrafter, FakeVerifier, continuation

TWO, ONE = (
    Groups(8 // lanes, FixedPlanner(5, lanes=lanes), DraftWorth(lanes, 1.0), TurnTimes(lanes)) for lanes in (2, 1)
)


class Target:
    """What a target tells of its work."""

    def __init__(self, worked_s: float = 0.0) -> None:
        self.worked_s = worked_s

    def work(self, grouping: Grouping, others_s: float, round_count: int = ROUNDS) -> int:
        """Work a second for each round, and `others_s` for others; return how often what is known of others changed."""
        change_count = 0
        for _ in range(round_count):
            self.worked_s += 1 + others_s
            change_count += grouping.observe(1.0, self.worked_s, 10.0)
        return change_count


def test_groups_change_with_what_others_have_of_a_targets_work_and_not_at_every_change_of_it() -> None:
    grouping, target = Grouping(TWO, ONE), Target()
    target.work(grouping, 0, 1)
    for others_s, expected in ((0.0, TWO), (0.25, TWO), (0.5, ONE), (0.25, ONE), (3.0, ONE), (0.0, TWO), (0.25, TWO)):
        before = grouping.now(MAX_ROWS, is_near=True)
        assert target.work(grouping, others_s) == (before is not expected)
        assert grouping.now(MAX_ROWS, is_near=True) is expected


def test_what_a_target_did_while_there_was_nothing_to_do_and_a_new_start_of_it_are_no_work_for_others() -> None:
    grouping, target = Grouping(TWO, ONE), Target(1000.0)
    target.work(grouping, 0, 1 + ROUNDS)
    target.worked_s += 1000
    target.work(grouping, 0)
    assert not grouping.is_shared
    Target().work(grouping, 0)
    assert not grouping.is_shared


def test_a_target_that_does_not_tell_its_work_is_not_shared() -> None:
    grouping = Grouping(TWO, ONE)
    for _ in range(2 * ROUNDS):
        grouping.observe(1.0, 0.0, 10.0)
    assert not grouping.is_shared


def test_no_group_has_more_rows_than_the_services_take() -> None:
    grouping = Grouping(TWO, ONE)
    Target().work(grouping, 3.0, 1 + ROUNDS)
    assert [grouping.now(most, is_near=True) for most in (0, 7, 8, MAX_ROWS)] == [TWO, TWO, ONE, ONE]


def test_two_groups_hide_each_others_way_to_a_target_that_is_far_though_it_is_shared() -> None:
    grouping = Grouping(TWO, ONE)
    Target().work(grouping, 3.0, 1 + ROUNDS)
    assert grouping.now(MAX_ROWS, is_near=False) is TWO


def test_answers_that_come_out_of_order_are_no_work_for_others() -> None:
    """A round that has a draft service take a prompt in may end long after the target's answer."""
    grouping = Grouping(TWO, ONE)
    worked_s = 0.0
    for _ in range(2 * ROUNDS):
        before_s, worked_s = worked_s + 0.03, worked_s + 0.05
        grouping.observe(0.02, worked_s, 0.1)
        grouping.observe(0.03, before_s, 0.2)
        assert not grouping.is_shared


class BusyTarget(FakeVerifier):
    """A target that works for others too, so little that every round takes longer."""

    own_s = 1e-6
    others_s = 3e-6
    worked_s = 0.0

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        self.worked_s += self.own_s + self.others_s
        self.timing = CallTiming(executed_s=self.own_s, worked_s=self.worked_s)
        return await super().verify(rows, timeout_s)


@pytest.mark.parametrize(
    ("asked", "draft_rows", "target_rows", "most"),
    [
        ({}, 8, 8, 8),
        ({}, 7, 8, 4),
        ({}, 8, 7, 4),
        ({"lanes": 2}, 8, 8, 4),
        ({"lanes": 1}, 8, 8, 4),
        ({"policy": "eqspec"}, 8, 8, 4),
        ({"draft_count": "auto"}, 8, 8, 8),
    ],
)
async def test_a_coordinator_has_one_group_of_twice_the_rows_at_a_target_that_works_for_others(
    asked: dict[str, Any], draft_rows: int, target_rows: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where lanes are asked for, and where a service takes fewer rows, groups stay as they are."""
    monkeypatch.setattr(way, "FAR_SHARE", inf)  # these services take no time, so the way is all of a round
    drafter, verifier = FakeDrafter(0.7), BusyTarget()
    drafter.max_rows = draft_rows
    verifier.description = replace(verifier.description, max_rows=target_rows)
    async with scheduling(drafter, verifier, **{"batch_size": 4, "lanes": None} | asked) as (admission, scheduler):
        outputs = await generate_all(admission, scheduler, prompts(32), 60)
        assert outputs == [continuation(prompt, 60) for prompt in prompts(32)]
        assert max(map(len, verifier.calls)) == most
        verifier.others_s = 0.0
        await generate_all(admission, scheduler, prompts(64), 60)
        assert all(len(call) <= 4 for call in verifier.calls[-ROUNDS:])


class Strict(FakeVerifier):
    """A target that refuses calls of more rows than it says it takes."""

    refused_count = 0

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        if len(rows) > self.description.max_rows:
            self.refused_count += 1
            raise InvalidRequest("rows has more entries than are taken in a call")
        return await super().verify(rows, timeout_s)


async def test_a_target_that_takes_fewer_rows_after_a_restart_gets_groups_of_so_many() -> None:
    """Each of its calls was refused, and each generation of the group then had a round alone."""
    verifier = Strict()
    verifier.description = replace(verifier.description, max_rows=4)
    async with dispatching([FakeDrafter(0.7)], [verifier], batch_size=4) as running:
        assert [await output(submit(running, prompt)) for prompt in prompts(4)] == list(map(whole, prompts(4)))
        for most_rows in (3, 1):
            running.targets[0].lose(PeerUnavailable("killed"))
            verifier.description = replace(verifier.description, max_rows=most_rows)
            verifier.calls.clear()
            requests = [submit(running, prompt) for prompt in prompts(8)]
            await running.targets[0].look()
            assert await asyncio.gather(*map(output, requests)) == list(map(whole, prompts(8)))
            assert max(map(len, verifier.calls)) == most_rows
        assert not verifier.refused_count
