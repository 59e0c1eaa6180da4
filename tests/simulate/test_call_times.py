"""Seconds of calls, foreseen from measured sums."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from paceline.simulate.call_times import CallTimes, Work
from paceline.types import CallCosts
from tests.simulate.made_up_costs import DRAFT, calls, propose_s, verify_s

TARGET = CallTimes([one for one in calls() if not one.draft_model])


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize(("rows", "steps"), [(1, 5), (3, 1), (6, 4), (8, 7)])
def test_calls_of_other_sizes_are_foreseen_from_those_that_were_measured(rows: int, steps: int, at_once: int) -> None:
    foreseen = TARGET.foresee(Work(at_once, rows, steps, rows * steps, 0)).executed_s
    assert foreseen == pytest.approx(verify_s(rows, rows * steps, at_once=at_once), rel=0.03)


def test_prompts_cost_by_their_tokens() -> None:
    foreseen = TARGET.foresee(Work(1, 4, 5, 20, 200)).executed_s
    assert foreseen == pytest.approx(verify_s(4, 20, 200), rel=0.03)


def test_more_rounds_at_once_than_were_measured_cost_as_the_most_that_were() -> None:
    times = [TARGET.foresee(Work(at_once, 4, 5, 20, 0)).executed_s for at_once in (1, 2, 5)]
    assert times[0] < times[1] == pytest.approx(times[2], rel=1e-6)


def test_drafting_costs_by_its_steps() -> None:
    times = CallTimes([one for one in calls() if one.draft_model == DRAFT])
    assert times.foresee(Work(1, 4, 3, 12, 0)).executed_s == pytest.approx(propose_s(4, 3), rel=0.03)


@pytest.mark.parametrize(("at_once", "factor"), [(1, 1.0), (2, 1.5)])
def test_what_is_drawn_has_the_foreseen_mean_and_the_spread_of_as_many_rounds_at_once(
    at_once: int, factor: float
) -> None:
    """The wire did not spread: rounds hardly met, and a simulated service was waited for too little."""
    measured = [one for one in calls() if not one.draft_model]
    wide = CallTimes([_with_spread(one, 0.2, 0.4) for one in measured])
    work, rng = Work(at_once, 4, 5, 20, 0), Random(1)
    drawn, foreseen = [wide.draw(work, rng) for _ in range(4000)], wide.foresee(work)
    _check([one.executed_s for one in drawn], foreseen.executed_s, 0.2 * factor)
    _check([one.wire_s for one in drawn], foreseen.wire_s, 0.4 * factor)


def _check(drawn: Sequence[float], mean: float, spread: float) -> None:
    found = sum(drawn) / len(drawn)
    assert found == pytest.approx(mean, rel=0.03)
    deviation = (sum((one - found) ** 2 for one in drawn) / len(drawn)) ** 0.5
    assert deviation / found == pytest.approx(spread, rel=0.1)


def _with_spread(calls: CallCosts, of_work: float, of_wire: float) -> CallCosts:
    """Return them with these coefficients of variation, half as large again with two rounds at once."""
    factor = 1.5 if calls.round_count_at_once == 2 else 1.0
    work, wire = (
        seconds**2 / calls.call_count * (1 + (factor * share) ** 2)
        for seconds, share in ((calls.executed_s, of_work), (calls.wire_s, of_wire))
    )
    return replace(calls, executed_squares=work, wire_squares=wire)
