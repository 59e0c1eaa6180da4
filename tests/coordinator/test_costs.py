"""Prices of the parts of rounds, learned from the times of whole rounds."""

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from coordinator.rounds.costs import BENDS, CACHED, CALL, CAUGHT_UP, PROMPT, STEP, RoundCosts, RoundWork
from coordinator.rounds.round_report import DraftCall
from coordinator.rounds.sources import MOST_MODELS

MODEL = "draft"


def work(drafted: int, *, prompt: int = 0, caught_up: int = 0, rows: int = 4) -> RoundWork:
    """A round in which each row has as many drafts of a draft service; 0: it is not asked."""
    call = DraftCall(rows, drafted, rows * drafted, caught_up)
    return RoundWork(rows, rows * drafted, prompt, {MODEL: call} if drafted else {})


def seconds(done: RoundWork) -> float:
    """10 ms for a round, 0.3 a draft token, 2 a call, 1 a step; 0.2 a prompt token, 0.05 a token that was missed."""
    call = (done.draft_calls or {}).get(MODEL)
    drafting = 2 + call.step_count + 0.05 * call.caught_up_count if call else 0.0
    return (10 + 0.3 * done.drafted_count + 0.2 * done.prompt_count + drafting) / 1000


def learned(rounds: Sequence[RoundWork]) -> RoundCosts:
    costs = RoundCosts()
    for number, done in enumerate(rounds):
        costs.add([done], seconds(done))
        if number % 8 == 0:
            costs.fit()
    costs.fit()
    return costs


def mixed(count: int) -> list[RoundWork]:
    rng = random.Random(1)
    return [
        work(rng.choice([0, 1, 2, 4, 8]), prompt=rng.choice([0] * 9 + [100]), caught_up=rng.choice([0] * 9 + [100]))
        for _ in range(count)
    ]


def test_the_time_of_a_round_is_foreseen_from_its_parts() -> None:
    costs = learned(mixed(1500))
    for count in (0, 1, 2, 3, 4, 6, 8):
        assert costs.predict(work(count)) * costs.unit_s == pytest.approx(seconds(work(count)), rel=0.1)
    assert costs.price(PROMPT) * costs.unit_s == pytest.approx(0.2 / 1000, rel=0.2)
    assert costs.price(CAUGHT_UP, MODEL) * costs.unit_s == pytest.approx(0.05 / 1000, rel=0.3)


@pytest.mark.parametrize(("waited_share", "expected_share"), [(0.0, 0.5), (0.5, 0.75)])
def test_a_call_costs_what_rounds_wait_for_it_in_the_mean(waited_share: float, expected_share: float) -> None:
    """Every second call is of drafts that were prepared, which were there at once or after a part of the time."""
    costs = RoundCosts()
    for number in range(800):
        done, call_s = work(4 * (number % 4 in (1, 2))), (2 + 4) / 1000
        took_s = seconds(done)
        if done.draft_calls and number % 2:
            wait_s = waited_share * call_s
            took_s += wait_s - call_s
            done = replace(done, draft_calls={MODEL: replace(done.draft_calls[MODEL], prepared_wait_s=wait_s)})
        costs.add([done], took_s)
        costs.fit()
    more_s = (costs.predict(work(4)) - costs.predict(replace(work(4), draft_calls={}))) * costs.unit_s
    assert more_s == pytest.approx(expected_share * call_s, rel=0.1)


def test_what_a_draft_service_missed_costs_all_of_its_time_however_much_is_prepared_in_other_rounds() -> None:
    """It counted as little as a prepared call: long prompts were brought to draft services, and tried, for nothing."""
    costs, rng = RoundCosts(), random.Random(1)
    for number in range(800):
        done = work(rng.choice([0, 1, 2, 4, 8]), caught_up=rng.choice([50, 100, 200]) if number % 20 == 0 else 0)
        took_s = seconds(done)
        if (call := (done.draft_calls or {}).get(MODEL)) and not call.caught_up_count and number % 4:
            took_s = seconds(replace(done, draft_calls={}))
            done = replace(done, draft_calls={MODEL: replace(call, prepared_wait_s=0.0)})
        costs.add([done], took_s)
        costs.fit()
    assert costs.price(CALL, MODEL) * costs.unit_s < 0.5 * 2 / 1000
    assert costs.price(CAUGHT_UP, MODEL) * costs.unit_s == pytest.approx(0.05 / 1000, rel=0.3)


def test_no_price_is_ever_below_nothing() -> None:
    """Rounds with more drafts that happen to be faster must not make drafts a gain."""
    costs = RoundCosts()
    for number in range(400):
        costs.add([work(number % 5)], 0.01 - 0.001 * (number % 5))
        costs.fit()
    assert costs.drafted_price(len(BENDS)) >= 0
    assert costs.price(CALL, MODEL) + 4 * costs.price(STEP, MODEL) >= 0


def test_weights_that_are_made_lighter_change_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = learned(mixed(300))
    monkeypatch.setattr("coordinator.rounds.least_squares.HEAVIEST", 1.1)
    lightened = learned(mixed(300))
    for count in (0, 1, 8):
        assert lightened.predict(work(count)) == pytest.approx(kept.predict(work(count)), rel=1e-6)


def test_a_pause_hardly_changes_what_is_foreseen() -> None:
    costs = learned(mixed(1500))
    before = costs.predict(work(4))
    costs.add([work(4)], 5.0)
    costs.fit()
    assert costs.predict(work(4)) == pytest.approx(before, rel=0.05)


def test_a_machine_that_became_three_times_as_slow_is_foreseen_soon() -> None:
    costs = learned([work(4), work(0)] * 500)
    for _ in range(60):
        for count in (4, 0):
            costs.add([work(count)], 3 * seconds(work(count)))
            costs.fit()
    assert costs.predict(work(4)) * costs.unit_s == pytest.approx(3 * seconds(work(4)), rel=0.15)


def of_model(model: str, drafted: int) -> RoundWork:
    done = work(drafted)
    return replace(done, draft_calls={model: done.draft_calls[MODEL]}) if done.draft_calls else done


def test_a_model_that_takes_the_place_of_another_has_prices_of_its_own() -> None:
    costs, rng = RoundCosts(), random.Random(1)
    for model in (*map(str, range(MOST_MODELS)), "new"):
        slower = 1 if model == "new" else 2
        for count in rng.choices([0, 1, 2, 4, 8], k=100):
            costs.add([of_model(model, count)], seconds(work(count)) * (slower if count else 1))
        costs.fit()
    for count in (1, 2, 4, 8):
        assert costs.predict(of_model("new", count)) * costs.unit_s == pytest.approx(seconds(work(count)), rel=0.1)


def test_rounds_that_ask_more_models_than_are_kept_teach_what_they_take() -> None:
    """Nothing was learned of such a round."""
    calls = {str(number): DraftCall(1, 4, 4, 0) for number in range(MOST_MODELS + 2)}
    done, costs = RoundWork(len(calls), 4 * len(calls), 0, calls), RoundCosts()
    for _ in range(100):
        costs.add([work(0)], 0.01)
        costs.add([done], 0.2)
    costs.fit()
    assert len(costs.models) == MOST_MODELS
    assert costs.predict(done) * costs.unit_s == pytest.approx(0.2, rel=0.1)


def test_what_another_lane_does_meanwhile_is_part_of_what_it_costs() -> None:
    """Two lanes take turns at the target: a token of one delays both."""
    costs, lanes = RoundCosts(), [work(0), work(0)]
    rng = random.Random(2)
    for number in range(2000):
        lanes[number % 2] = work(rng.choice([0, 2, 4]))
        costs.add([lanes[1 - number % 2], lanes[number % 2]], sum(map(seconds, lanes)))
        costs.fit()
    for count in (0, 2, 4):
        assert costs.predict(work(count)) * costs.unit_s == pytest.approx(2 * seconds(work(count)), rel=0.1)


@pytest.mark.parametrize("pass_count", [1, 2, 9])
def test_what_runs_beside_a_call_is_shared_among_its_passes(pass_count: int) -> None:
    """What is foreseen is of one pass. It had the time of all that ran beside the whole call."""
    costs, rng = RoundCosts(), random.Random(1)
    for _ in range(400):
        large, small = [RoundWork(rows, rng.randrange(4 * rows)) for rows in (8, 2)]
        own, beside = [replace(one, further=[one] * (pass_count - 1)) for one in (large, small)]
        cycle_s = pass_count * (seconds(large) + seconds(small))
        costs.add([own], cycle_s, [beside])
    costs.fit()
    assert costs.predict(large) * costs.unit_s == pytest.approx(cycle_s / pass_count, rel=0.1)
    assert costs.predict(own) * costs.unit_s == pytest.approx(cycle_s, rel=0.1)


def test_tokens_beyond_those_that_are_free_have_their_price() -> None:
    """Reading the weights takes as long as 16 tokens."""
    costs = RoundCosts()
    rng = random.Random(3)
    for _ in range(1500):
        count = rng.choice([0, 1, 2, 3])
        free = RoundWork(8, 8 * count)
        costs.add([free], 0.01 + 0.001 * max(0, 8 + 8 * count - 16))
        costs.fit()
    assert costs.drafted_price(0) < 0.25 * costs.drafted_price(1)
    assert costs.drafted_price(1) * costs.unit_s == pytest.approx(0.001, rel=0.2)


def test_long_texts_are_not_taken_for_dear_drafts() -> None:
    """Texts that copy their long prompts have more drafts: their rounds take longer for what they attend to."""
    costs = RoundCosts()
    rng = random.Random(4)
    for _ in range(1500):
        cached, count = rng.choice([(2000, 1), (8000, 4)])
        count += rng.choice([0, 1])
        costs.add([RoundWork(4, 4 * count, cached_count=cached)], 0.005 + 0.0005 * cached / 1000 + 0.0001 * 4 * count)
    costs.fit()
    assert costs.drafted_price(0) * costs.unit_s == pytest.approx(0.0001, rel=0.2)  # without that price 0.00035
    assert costs.price(CACHED) * costs.unit_s == pytest.approx(0.0005 / 1000, rel=0.1)


def test_what_is_not_measured_between_two_times_of_forgetting_is_forgotten_once() -> None:
    costs = learned([work(count) for count in (0, 4, 8) * 60])
    for _ in range(4):
        costs.forget()
        for _ in range(12):
            costs.add([work(0)], seconds(work(0)))
    costs.fit()
    assert costs.predict(work(4)) * costs.unit_s == pytest.approx(seconds(work(4)), rel=0.1)


def heads_work(row_count: int, *, verified: int = 0) -> RoundWork:
    """Eight rows, of which some ask the target's heads for five drafts each."""
    made = 5 * row_count
    return RoundWork(8, verified, heads_count=made, heads_call_count=int(made > 0))


def test_what_heads_take_whatever_they_draft_is_no_part_of_a_draft() -> None:
    """As measured: 1.1 ms, and 0.05 a draft. A part of each draft, it made one row's seem cheap."""

    def took(done: RoundWork) -> float:
        return 0.004 + 0.0011 * done.heads_call_count + 0.00005 * done.heads_count

    costs, rng = RoundCosts(), random.Random(5)
    for _ in range(1000):
        done = heads_work(rng.choice([0, 1, 8, 8, 8]))
        costs.add([done], took(done))
    costs.fit()
    for row_count in (0, 1, 8):
        done = heads_work(row_count)
        assert costs.predict(done) * costs.unit_s == pytest.approx(took(done), rel=0.05)


def test_there_is_more_doubt_about_what_was_seldom_measured() -> None:
    costs, rng = RoundCosts(), random.Random(6)
    for number in range(400):
        verified = 8 if number % 50 == 0 else 0
        costs.add([RoundWork(8, verified)], (0.005 + 0.0002 * verified) * rng.lognormvariate(0, 0.3))
    costs.fit()
    drafts, heads = RoundWork(8, 8), heads_work(8)
    seldom, never = (costs.doubt(one, RoundWork(8)) for one in (drafts, heads))
    assert 0 < seldom < never
    for _ in range(100):
        costs.add([drafts], (0.005 + 0.0002 * 8) * rng.lognormvariate(0, 0.3))
    costs.fit()
    assert costs.doubt(drafts, RoundWork(8)) < seldom / 2
    assert costs.doubt(drafts, drafts) == 0


def test_doubt_is_about_by_how_much_prices_that_were_learned_differ() -> None:
    found, doubts = [], []
    for seed in range(40):
        costs, rng = RoundCosts(), random.Random(seed)
        for number in range(300):
            verified = 8 * (number % 4 == 0)
            costs.add([RoundWork(8, verified)], (0.005 + 0.0002 * verified) * rng.lognormvariate(0, 0.2))
        costs.fit()
        more, less = RoundWork(8, 8), RoundWork(8)
        found.append((costs.predict(more) - costs.predict(less)) * costs.unit_s)
        doubts.append(costs.doubt(more, less) * costs.unit_s)
    assert 0.6 < fmean(doubts) / pstdev(found) < 1.8


def test_a_pause_or_a_dear_prompt_is_no_reason_for_doubt() -> None:
    costs, rng = RoundCosts(), random.Random(8)
    for number in range(400):
        costs.add([RoundWork(8, 8 * (number % 2))], 0.005 * rng.lognormvariate(0, 0.2))
    costs.fit()
    before = costs.doubt(RoundWork(8, 8), RoundWork(8))
    costs.add([RoundWork(8, 0, prompt_count=500)], 0.5)
    costs.add([RoundWork(8)], 5.0)
    costs.fit()
    assert costs.doubt(RoundWork(8, 8), RoundWork(8)) < 2 * before


def test_there_is_less_doubt_where_times_vary_less() -> None:
    doubts = []
    for deviation in (0.1, 0.4):
        costs, rng = RoundCosts(), random.Random(7)
        for number in range(400):
            costs.add([RoundWork(8, 8 * (number % 2))], 0.005 * rng.lognormvariate(0, deviation))
        costs.fit()
        doubts.append(costs.doubt(RoundWork(8, 8), RoundWork(8)))
    assert doubts[0] < doubts[1] / 2
