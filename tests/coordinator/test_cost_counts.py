"""Sums of what calls cost and of how often drafts were right, for those who plan other clusters."""

import random
from dataclasses import replace

import pytest

from coordinator.requests.generation import Generation
from coordinator.rounds.cost_counts import CostCounts
from coordinator.rounds.round_report import DraftCall, RoundReport, RowReport
from paceline.errors import PeerUnavailable
from paceline.types import AcceptanceCounts, CallCosts, DraftSource, HopTime, MeasuredCosts
from tests.generations import generation_of

MODEL = "draft"


def row(drafted: int, accepted: int, generation: Generation | None = None) -> RowReport:
    return RowReport(drafted, accepted, accepted + 1, DraftSource.DRAFT, MODEL, generation)


def report(rows: list[RowReport], error: PeerUnavailable | None = None, prompt: int = 0) -> RoundReport:
    calls = {MODEL: DraftCall(len(rows), 4, 4 * len(rows), 0)}
    hops = HopTime(0.001, 0.0, 0.002), HopTime(0.001, 0.5, 0.004)
    times = {} if error else {MODEL: hops[0]}
    return RoundReport(rows, 0.51, *hops, error, None, prompt_token_count=prompt, draft_calls=calls, draft_times=times)


def test_calls_of_one_size_are_summed_without_their_waiting() -> None:
    costs = CostCounts()
    for _ in range(2):
        costs.add(report([row(4, 2), row(4, 0)]), 2, 0.512)
    verify, propose = costs.snapshot().calls
    assert (verify.draft_model, verify.round_count_at_once, verify.row_count, verify.step_count) == ("", 2, 2, 4)
    assert (verify.call_count, verify.drafted_count, verify.prompt_count) == (2, 16, 0)
    assert (verify.executed_s, verify.executed_squares) == pytest.approx((0.008, 2 * 0.004**2))
    assert (verify.wire_s, verify.own_s) == pytest.approx((0.002, 2 * (0.512 - 0.508)))
    sums = (0.004, propose.executed_squares, 0.002, 0.0, propose.wire_squares)
    assert propose == CallCosts(MODEL, 2, 2, 4, 2, 16, 0, *sums)
    assert (propose.executed_squares, propose.wire_squares) == pytest.approx((2 * 0.002**2, 2 * 0.001**2))


def test_calls_with_prompts_and_beside_other_rounds_stand_apart() -> None:
    costs = CostCounts()
    for at_once, prompt in ((1, 0), (2, 0), (1, 40), (1, 60), (1, 90)):
        costs.add(report([row(4, 4)], prompt=prompt), at_once, 0.5)
    target = [one for one in costs.snapshot().calls if not one.draft_model]
    assert [(one.round_count_at_once, one.prompt_count) for one in target] == [(1, 0), (1, 100), (1, 90), (2, 0)]


def test_a_round_without_its_drafts_says_nothing() -> None:
    costs = CostCounts()
    costs.add(report([row(0, 0)], PeerUnavailable("gone")), 1, 0.5)
    assert costs.snapshot() == MeasuredCosts()


def test_each_model_of_several_has_the_time_of_its_own_call_and_one_that_failed_has_none() -> None:
    """All had the time of the slowest, which was that of a call that failed after seconds."""
    quick, slow = HopTime(0.001, 0.0, 0.002), HopTime(0.001, 0.0, 0.012)
    calls = dict.fromkeys(("quick", "slow", "lost"), DraftCall(1, 4, 4, 0))
    costs, times = CostCounts(), {"quick": quick, "slow": slow}
    costs.add(replace(report([row(4, 4)]), propose=HopTime(3.0), draft_calls=calls, draft_times=times), 1, 3.1)
    told = {one.draft_model: one.executed_s for one in costs.snapshot().calls if one.draft_model}
    assert told == {"quick": 0.002, "slow": 0.012}


def test_a_draft_after_a_wrong_one_was_not_compared() -> None:
    costs = CostCounts()
    costs.add(report([row(4, 2), row(4, 4), row(4, 0)]), 1, 0.5)
    assert costs.snapshot().acceptances == (AcceptanceCounts(DraftSource.DRAFT, MODEL, (3, 2, 2, 1), (2, 2, 1, 1)),)


def outputs(rates: list[float]) -> CostCounts:
    """Outputs of 100 rounds, whose drafts are right at these rates."""
    rng, costs = random.Random(1), CostCounts()
    for rate in rates:
        one = generation_of(max_new_tokens=1000)
        for number in range(100):
            last = replace(row(1, int(rng.random() < rate), one), is_last=number == 99)
            costs.add(report([last]), 1, 0.5)
    return costs


@pytest.mark.parametrize("rates", [[0.7] * 100, [0.5, 0.9] * 50])
def test_outputs_differ_by_more_than_luck_only_if_their_texts_do(rates: list[float]) -> None:
    (found,) = outputs(rates).snapshot().acceptances
    assert found.output_deviation == pytest.approx(rates[1] - 0.7, abs=0.03)


@pytest.mark.parametrize(
    "last_round",
    [
        report([RowReport(0, 0, 1)]),
        report([RowReport(1, 0, 1, DraftSource.SUFFIX)]),
        report([row(1, 0)], PeerUnavailable("gone")),
        replace(report([row(1, 0)]), draft_calls={MODEL: DraftCall(1, 1, 1, 0, prepared_wait_s=0.0)}),
    ],
    ids=["no drafts", "drafts of another source", "a draft service that failed", "drafts that were made before"],
)
def test_an_output_counts_whatever_its_last_round_had(last_round: RoundReport) -> None:
    """One that ended in a round without the source's drafts was left out, as a quarter were: a token alone has none."""
    costs = CostCounts()
    for accepted_count in (0, 4):
        one = generation_of(max_new_tokens=1000)
        for _ in range(20):
            costs.add(report([row(4, accepted_count, one)]), 1, 0.5)
        costs.add(replace(last_round, rows=[replace(last_round.rows[0], generation=one, is_last=True)]), 1, 0.5)
    of_draft = costs.snapshot().acceptances[0]
    assert of_draft.source is DraftSource.DRAFT and of_draft.output_deviation > 0.3


def test_rounds_in_flight_are_counted_until_they_end() -> None:
    costs = CostCounts()
    with costs.in_flight() as one, costs.in_flight() as both:
        assert (one, both) == (1, 2)
    with costs.in_flight() as again:
        assert again == 1
