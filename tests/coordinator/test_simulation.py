"""A coordinator in simulated time."""

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from coordinator.simulation.run import simulate
from coordinator.simulation.services import SimulatedService, SimulatedTarget, Surroundings
from coordinator.simulation.simulated_time import SimulatedTimeLoop
from coordinator.simulation.texts import Text, Texts
from paceline.errors import InvalidRequest
from paceline.simulate.call_times import CallTimes
from paceline.simulate.cluster import PlannedRequest, SimulatedCluster
from paceline.simulate.result import SimulationResult
from paceline.simulate.saved_costs import SavedModel
from paceline.types import AcceptanceCounts, CallTiming, DraftSource, MeasuredCosts, VerifyRow
from tests.simulate.made_up_costs import DRAFT, propose_s, saved_costs, verify_s

OVERHEAD_S = 0.0015
"""What a verify takes beside its work: on the wire, and the coordinator's own."""


def simulated(clients: int = 4, count: int = 8, output: int = 24, prompt: int = 30, **asked: Any) -> SimulationResult:
    asked = {"batch_size": 4, "lane_count": 2, "draft_count": 5} | asked
    requests = [PlannedRequest(prompt, output)] * count
    return simulate(saved_costs(), SimulatedCluster(**asked), requests, client_count=clients, seed=1)


def test_time_passes_only_where_everything_waits() -> None:
    async def wait() -> float:
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        assert runner.run(wait()) == pytest.approx(7200)


def test_the_same_arguments_give_the_same_result() -> None:
    assert simulated(draft_count="auto") == simulated(draft_count="auto")


@pytest.mark.parametrize(
    ("name", "value"), [("QUEUE_LIMIT", "1"), ("POLICY", "eqspec"), ("TLS_CERTIFICATE", "half.pem")]
)
def test_what_a_coordinator_here_would_read_changes_no_simulation(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated coordinator read the environment: requests were refused, or a traceback told of a certificate."""
    before = simulated(clients=12, count=12)
    monkeypatch.setenv(f"PACELINE_COORDINATOR_{name}", value)
    assert simulated(clients=12, count=12) == before


def test_plain_decoding_alone_takes_a_round_a_token() -> None:
    result = simulated(clients=1, count=2, draft_count=0, draft_service_count=0)
    assert result.round_count == 2 * 24
    each = result.summary.per_token_s
    assert each and each.p50 == pytest.approx(verify_s(1, 0) + OVERHEAD_S, rel=0.05)


def test_drafts_that_are_always_right_take_one_round_for_all_of_them() -> None:
    saved = saved_costs(right=(100,) * 8, deviation=0.0)
    cluster = SimulatedCluster(4, 2, 5)
    result = simulate(saved, cluster, [PlannedRequest(4, 60)], client_count=1, seed=1)
    assert result.round_count < 14
    assert result.summary.accepted_count > 0.9 * result.summary.drafted_count


def test_a_round_takes_what_its_calls_take() -> None:
    result = simulated(clients=1, count=1, output=200)
    rounds_s = propose_s(1, 5) + verify_s(1, 5) + OVERHEAD_S + 0.0015
    assert result.summary.elapsed_s == pytest.approx(result.round_count * rounds_s, rel=0.05)


def test_all_outputs_have_their_length_and_all_caches_are_counted() -> None:
    result = simulated(clients=8, count=8)
    assert result.summary.counts["completed"] == 8
    assert {one.output_count for one in result.requests} == {24}
    target = result.services[0]
    assert 8 * 30 < target.peak_tokens <= 8 * (30 + 24 + 5)
    assert target.peak_bytes == 1000 * target.peak_tokens


def test_a_long_prompt_comes_in_chunks() -> None:
    assert simulated(clients=1, count=1, output=2, prompt=64 * 5).round_count >= 5


def test_a_far_draft_service_makes_each_round_longer() -> None:
    near, far = simulated(clients=1), simulated(clients=1, draft_round_trip_s=0.03)
    assert far.summary.elapsed_s == pytest.approx(near.summary.elapsed_s + 0.03 * near.round_count, rel=0.1)


def test_a_far_target_runs_as_many_plain_rounds_a_call_as_take_the_time_of_the_way() -> None:
    way_s = 4.5 * verify_s(1, 0)
    plain: dict[str, Any] = {"clients": 1, "count": 1, "output": 500, "draft_count": 0, "draft_service_count": 0}
    near, far = (simulated(**plain, target_round_trip_s=one) for one in (0.0, way_s))
    assert near.round_count == far.round_count == 500 == near.services[0].call_count
    assert far.services[0].call_count < 500 / 4
    assert far.summary.elapsed_s < near.summary.elapsed_s + way_s * 500 / 4


def test_what_a_coordinator_does_itself_is_no_way_to_its_target() -> None:
    """It was taken for a far one, and ran further rounds."""
    own_s, count = 4.5 * verify_s(1, 0), 500
    saved = saved_costs()
    calls = tuple(replace(one, own_s=one.call_count * own_s) for one in saved.costs.calls)
    slow = replace(saved, costs=replace(saved.costs, calls=calls))
    cluster = SimulatedCluster(4, 2, 0, draft_service_count=0)
    result = simulate(slow, cluster, [PlannedRequest(1, count)], client_count=1, seed=1)
    target = result.services[0]
    assert result.round_count == target.call_count == count
    assert result.summary.elapsed_s == pytest.approx(count * (verify_s(1, 0) + 0.001 + own_s), rel=0.05)
    assert target.queued_s == pytest.approx(0.0)


def test_rounds_of_a_far_target_with_drafts_are_a_call_each() -> None:
    near, far = simulated(clients=1), simulated(clients=1, target_round_trip_s=0.1)
    assert far.summary.elapsed_s == pytest.approx(near.summary.elapsed_s + 0.1 * near.round_count, rel=0.1)


def test_a_far_target_of_several_coordinators_runs_none_for_others_wait() -> None:
    shared: dict[str, Any] = {"draft_count": 0, "draft_service_count": 0, "target_round_trip_s": 0.1}
    result = simulated(clients=8, count=16, output=120, coordinator_count=2, **shared)
    assert result.round_count < 2 * result.services[0].call_count


def test_more_replicas_answer_more_where_each_has_its_machine() -> None:
    one, two = (simulated(16, 32, apart=True, target_count=n, draft_service_count=n) for n in (1, 2))
    assert two.summary.tokens_per_s > 1.4 * one.summary.tokens_per_s
    assert len([use for use in two.services if use.call_count]) == 4


def test_two_groups_follow_each_other_through_the_stages() -> None:
    """Plain decoding, so that a lane waits for the target alone. One group at a time gains nothing."""
    plain: dict[str, Any] = {"draft_count": 0, "draft_service_count": 0, "apart": True, "clients": 8, "count": 32}
    alone, staged = (simulated(**plain, target_stage_count=count).summary.tokens_per_s for count in (1, 2))
    assert 1.6 * alone < staged < 2 * alone
    one_lane = [simulated(**plain, lane_count=1, target_stage_count=count).summary.tokens_per_s for count in (1, 2)]
    assert one_lane[1] == pytest.approx(one_lane[0], rel=0.02)


def test_as_many_groups_as_stages_fill_a_pipeline() -> None:
    """Two was the most there could be: six of eight stages had nothing to do."""
    plain: dict[str, Any] = {"draft_count": 0, "draft_service_count": 0, "apart": True, "clients": 32, "count": 64}
    two, eight = (simulated(**plain, lane_count=count, target_stage_count=8).summary.tokens_per_s for count in (2, 8))
    assert eight > 3 * two


def test_few_rows_run_in_one_group_where_the_coordinator_chooses_its_lanes() -> None:
    chosen, two = (simulated(clients=2, count=16, lane_count=lane_count) for lane_count in (None, 2))
    assert chosen.mean_group_size > 1.7
    assert two.mean_group_size < 1.2


def test_two_lanes_of_the_measured_coordinator_are_its_own_choice_and_others_were_asked_for() -> None:
    saved = saved_costs()
    found = [SimulatedCluster.measured(replace(saved, lane_count=count)).lane_count for count in (1, 2, 8)]
    assert found == [1, None, 8]


def test_a_stage_is_busy_for_its_part_of_each_call() -> None:
    use = {count: simulated(clients=1, target_stage_count=count).services[0].busy_share for count in (1, 4)}
    assert use[4] == pytest.approx(use[1] / 4, rel=0.02)


def test_coordinators_share_the_services() -> None:
    result = simulated(8, 16, coordinator_count=2, target_count=2)
    assert result.summary.counts["completed"] == 16


def test_coordinators_that_share_a_target_run_one_group_of_twice_the_rows_each() -> None:
    """Services told no most rows of a call, so each ran groups as if it were alone."""
    shared, held = (
        simulated(16, 64, output=60, coordinator_count=2, lane_count=lane_count) for lane_count in (None, 2)
    )
    assert held.mean_group_size <= 4 < 5 < shared.mean_group_size
    assert shared.summary.tokens_per_s > 1.1 * held.summary.tokens_per_s


async def asked_in_turn(later_s: float, *targets: SimulatedTarget) -> list[CallTiming]:
    """Ask each so much later than the one before; return what was told of each call."""

    async def ask(number: int, target: SimulatedTarget) -> CallTiming:
        await asyncio.sleep(number * later_s)
        return (await target.verify([VerifyRow(str(number), 0, (number,), ())])).timing

    return await asyncio.gather(*(ask(number, target) for number, target in enumerate(targets)))


@pytest.mark.parametrize("stage_count", [1, 2])
def test_a_call_tells_how_long_it_waited_for_calls_of_other_coordinators(stage_count: int) -> None:
    """None did, so planners learned others' work as a price of their own drafts."""
    saved, later_s = saved_costs(), 0.001
    surroundings = Surroundings(CallTimes(saved.costs.calls_of()), 0.0, lambda: 1, Random(1))
    service = SimulatedService("target", saved.target, surroundings, stage_count)
    one, other = (SimulatedTarget(service, Texts(saved.costs, DRAFT, 1)) for _ in range(2))
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        first, second, third, fourth = runner.run(asked_in_turn(later_s, one, other, one, one))
    stage_s = verify_s(1, 0) / stage_count
    assert first.others_s == 0.0
    assert second.others_s == pytest.approx(stage_s - later_s, rel=1e-3), "it came when a part of the first was done"
    assert third.others_s == pytest.approx(stage_s, rel=1e-3), "it waited for a call of its own coordinator too"
    assert fourth.others_s == pytest.approx(stage_s, rel=1e-3)
    assert all(timing.others_s <= timing.queued_s for timing in (second, third, fourth))


def test_requests_come_at_their_times() -> None:
    requests = [PlannedRequest(10, 4, at_s) for at_s in (0.0, 50.0, 100.0)]
    result = simulate(saved_costs(), SimulatedCluster(4, 2, 5), requests, seed=1)
    assert sorted(one.sent_s for one in result.requests) == pytest.approx([0.0, 50.0, 100.0])


def test_a_draft_of_which_nothing_is_known_is_refused() -> None:
    saved = saved_costs()
    plain = replace(saved, draft=None, costs=MeasuredCosts(saved.costs.calls))
    with pytest.raises(InvalidRequest, match="give --drafts 0"):
        simulate(plain, SimulatedCluster(4, 2, 5), [PlannedRequest(4, 4)])
    assert simulate(plain, SimulatedCluster(4, 2, 5, draft_service_count=0), [PlannedRequest(4, 4)]).round_count == 4


def test_texts_are_those_of_the_draft_that_the_costs_name() -> None:
    """A draft that was swapped, or one beside it, may have been compared more often."""
    saved, cluster, requests = saved_costs(), SimulatedCluster(4, 1, 5), [PlannedRequest(4, 60)] * 4
    other = AcceptanceCounts(DraftSource.DRAFT, "another draft", (9000,) * 8, (9000,) * 8)
    both = replace(saved, costs=replace(saved.costs, acceptances=(other, *saved.costs.acceptances)))
    assert simulate(both, cluster, requests) == simulate(saved, cluster, requests)


def test_a_draft_whose_calls_come_late_is_asked_seldom() -> None:
    """Its calls were timed by the clock of the machine, where they take no time."""
    result = simulated(count=4, output=400, lane_count=1, draft_round_trip_s=1.0)
    assert result == simulated(count=4, output=400, lane_count=1, draft_round_trip_s=1.0)
    calls = {one.name: one.call_count for one in result.services}
    assert calls["draft 1"] < calls["target 1"] / 2


def test_a_draft_that_was_not_asked_yet_is_refused() -> None:
    """Its calls would take no time."""
    saved = replace(saved_costs(), draft=SavedModel("a newer draft", 100, 64))
    with pytest.raises(InvalidRequest, match="no draft service of a newer draft"):
        simulate(saved, SimulatedCluster(4, 1, 5), [PlannedRequest(4, 8)])


def test_luck_belongs_to_a_text_and_its_positions() -> None:
    one, other = (Text("1 7", [0.8, 0.7, 0.6], 0.1) for _ in range(2))
    assert [one.accepted_count(place, 3) for place in range(50)] == [
        other.accepted_count(place, 3) for place in reversed(range(50))
    ][::-1]


def test_drafts_are_right_as_often_as_was_measured() -> None:
    rates = [0.8, 0.6, 0.4]
    found = [Text(f"1 {number}", rates, 0.0).accepted_count(0, 3) for number in range(3000)]
    assert sum(found) / 3000 == pytest.approx(0.8 + 0.8 * 0.6 + 0.8 * 0.6 * 0.4, rel=0.05)


def test_texts_that_are_missed_often_are_further_from_the_usual_than_those_that_are_missed_seldom() -> None:
    """Measured outputs were so. With as many above as below, some texts had every draft right."""
    shares = sorted(_right_share(Text(f"1 {number}", [0.9], 0.4)) for number in range(400))
    usual = sum(shares) / len(shares)
    assert usual == pytest.approx(0.9, abs=0.01)
    assert usual - shares[4] > 1.4 * (shares[-5] - usual)


def _right_share(text: Text) -> float:
    return sum(text.accepted_count(place, 1) for place in range(400)) / 400
