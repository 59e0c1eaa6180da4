"""Planners against rounds of known cost and acceptance: `auto` settles on the best count."""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.requests.acceptance import PRIOR_WEIGHT, ROUND_MEMORY, Acceptance, PlaceAcceptance
from coordinator.requests.generation import Generation, HeadsDraft
from coordinator.rounds.auto_planner import FIRST_COUNTS, WINDOW, AutoPlanner, _Search
from coordinator.rounds.fixed_planner import FixedPlanner
from coordinator.rounds.round_report import DraftCall, RoundReport, RowReport
from coordinator.rounds.wishes import DraftPlanner, Wish
from paceline.types import DraftSource, HopTime
from tests.fakes.draft_worlds import (
    COUNTS,
    MAX_LENGTHS,
    MODEL,
    RIGHT,
    SETTLED_ROUNDS,
    ConstantPlanner,
    World,
    best_fixed,
    goodput,
    group_of,
    reached,
    simulate,
)

RANGES = {
    "acceptance": (0.3, 0.95),
    "hop_s": (0.0001, 0.005),
    "draft_token_s": (0.0002, 0.01),
    "verify_s": (0.002, 0.05),
    "verified_token_s": (0.00001, 0.001),
}
"""Ranges of the search, with groups of 1 to 8. Frozen, like `ROUNDS` and `SETTLED_ROUNDS`."""
WORLDS = st.builds(World, *(st.floats(*ends) for ends in RANGES.values()), st.integers(1, 8))
CORNERS = [World(*costs, group_size) for *costs, group_size in product(*RANGES.values(), (1, 8))]  # type: ignore[call-arg, arg-type]
NEAR = 0.9
"""Least share of the best fixed count's goodput, in every world of the search."""
FOUND = {
    # review A1
    "a dear draft that is nearly always right": World(0.9375, 0.00390625, 0.0078125, 0.0024964, 0.00099827),
}

CLOSE = 0.93
"""The same share in worlds like a real service's. Long runs reach 0.97 and more; two short ones are within 2 %."""
PAIR = World(0.7, 0.0008, 0.0009, 0.006, 0.0003, jitter=0.15, spike_share=0.01, catch_up_token_s=0.00005)
REAL = {
    "a usual pair": PAIR,
    "times that vary by a third": replace(PAIR, jitter=0.3, spike_share=0.02),
    "generations that differ": replace(PAIR, acceptance=0.5, spread=0.4),
    "first drafts are right more often": replace(PAIR, acceptance=0.85, later_acceptance=0.85),
    "a draft that is seldom right": replace(PAIR, acceptance=0.32),
    "a draft that is never right": replace(PAIR, acceptance=0.0),
    "a draft ten times as slow": replace(PAIR, draft_token_s=0.009),
    "a cheap draft that is nearly always right": replace(PAIR, acceptance=0.9, draft_token_s=0.0002),
    "a target that takes tokens by sixteens": replace(PAIR, step_tokens=16, verified_token_s=0.0006),
    "a target whose first tokens are free": replace(PAIR, free_tokens=16, verified_token_s=0.001),
    "two lanes": replace(PAIR, lanes=2),
    "two lanes and long prompts": replace(PAIR, lanes=2, prompt_s=0.06),
    "prompts that a draft computes too": replace(PAIR, lanes=2, acceptance=0.45, prompt_s=0.2, draft_prompt_s=0.15),
    # review G4: the parts of a round do not show that plain decoding is faster
    "two lanes on the same cores": replace(PAIR, lanes=2, rivalry=0.6, acceptance=0.4, spread=0.3),
}
RIVALS = replace(PAIR, lanes=2, lane_rivalry=0.6, group_size=8)
LANES = {
    "drafts that pay beside a verify": (replace(RIVALS, lane_rivalry=0.1, acceptance=0.8), 2),
    "drafts that never pay": (replace(RIVALS, acceptance=0.1), 1),
    "prompts among rounds that want no drafts": (replace(RIVALS, acceptance=0.1, prompt_s=0.06), 1),
    "a target that a second lane costs nothing": (replace(RIVALS, lane_rivalry=0.0001, acceptance=0.1), 2),
}
"""Worlds where lanes are rivals, and how many are best."""
REAL_AT_8 = (
    "generations that differ",
    "a target that takes tokens by sixteens",
    "a target whose first tokens are free",
    "two lanes on the same cores",
)
"""Those in which it matters most that rows share a round."""


def at_sizes(names: Iterable[str], at_8: Collection[str]) -> list[Any]:
    """Return each world with groups of 1 and of 8. One of the two is `long`, so that each world comes once."""
    return [
        pytest.param(name, size, marks=() if (size == 8) == (name in at_8) else pytest.mark.long, id=f"{name}-{size}")
        for name in names
        for size in (1, 8)
    ]


@settings(max_examples=5)
@given(world=WORLDS)
def test_what_is_chosen_in_the_end_is_nearly_as_good_as_the_best_fixed_count(world: World) -> None:
    assert reached(world) >= NEAR


@pytest.mark.review
@pytest.mark.parametrize("name", FOUND)
def test_so_it_is_in_worlds_that_a_search_has_found(name: str) -> None:
    assert reached(FOUND[name]) >= NEAR


@pytest.mark.parametrize("corner_count", [3, pytest.param(len(CORNERS), marks=pytest.mark.long)])
def test_so_it_is_at_the_corners_of_the_ranges(corner_count: int) -> None:
    for world in random.Random(1).sample(CORNERS, corner_count):
        assert reached(world, seeds=range(5)) >= NEAR, world


@pytest.mark.review
@pytest.mark.parametrize(("name", "group_size"), at_sizes(REAL, REAL_AT_8))
def test_in_the_long_run_no_world_like_a_real_one_loses_by_it(name: str, group_size: int) -> None:
    world = replace(REAL[name], group_size=group_size, life_rounds=50 // group_size)
    assert reached(world, seeds=range(2), rounds=1500, settled=1000) >= CLOSE


@pytest.mark.parametrize("name", LANES)
def test_as_many_lanes_run_as_give_most(name: str) -> None:
    world, best = LANES[name]
    rounds = simulate([world] * 3000, AutoPlanner(2, chooses_lanes=True), 1)[1000:]
    assert fmean(one.lane_count == best for one in rounds) > 0.9
    assert goodput(rounds) >= CLOSE * best_fixed(world)


@pytest.mark.parametrize(
    ("name", "seed"), [("drafts that pay beside a verify", 1), ("a target that a second lane costs nothing", 2)]
)
def test_the_number_of_lanes_follows_the_rows(name: str, seed: int) -> None:
    """In the second world it did not in 3,000 rounds: a trial was judged by prices of long before it."""
    apart, beside = LANES["drafts that never pay"][0], LANES[name][0]
    rounds = simulate([apart] * 1500 + [beside] * 2000, AutoPlanner(2, chooses_lanes=True), seed)
    assert fmean(one.lane_count == 1 for one in rounds[1000:1500]) > 0.9
    assert fmean(one.lane_count == 2 for one in rounds[-1000:]) > 0.9


def test_lanes_that_were_asked_for_always_run() -> None:
    world = LANES["drafts that never pay"][0]
    assert {one.lane_count for one in simulate([world] * 500, AutoPlanner(2), 1)} == {2}


@pytest.mark.parametrize("seed_count", [2, pytest.param(6, marks=pytest.mark.long)])
def test_what_prompts_cost_without_drafts_is_learned_where_drafts_would_seem_to_pay(seed_count: int) -> None:
    """The share was 0.89: a prompt in a trial without drafts counted as that trial's loss, or came in none."""
    world = replace(REAL["prompts that a draft computes too"], group_size=4, life_rounds=12)
    assert reached(world, seeds=range(seed_count), rounds=2000, settled=1000) >= CLOSE


@pytest.mark.parametrize(("catch_up_token_s", "draft_prompt_s"), [(0.0002, 0.03), (0.0004, 0.06)])
def test_trials_of_a_draft_that_has_missed_everything_cost_what_it_takes_in(
    catch_up_token_s: float, draft_prompt_s: float
) -> None:
    """The share was 0.97 and 0.95: a round's share of that stood for all of it, and its rounds counted as no loss."""
    costs = {"catch_up_token_s": catch_up_token_s, "draft_prompt_s": draft_prompt_s, "prompt_s": 0.03}
    world = World(0.45, 0.001, 0.0015, 0.008, 0.0002, group_size=8, jitter=0.1, **costs)  # type: ignore[arg-type]
    shares = [
        goodput(simulate([world] * 1500, AutoPlanner(1), seed)[400:])
        / goodput(simulate([world] * 1500, ConstantPlanner(0), seed)[400:])
        for seed in range(2)
    ]
    assert fmean(shares) >= 0.985


@pytest.mark.parametrize("name", ["a draft ten times as slow", "a target whose first tokens are free", "two lanes"])
def test_two_thousand_rounds_lose_little_from_the_first_on(name: str) -> None:
    """Trials in an unknown world count too: a service does not live for ever."""
    world = replace(REAL[name], group_size=8, life_rounds=6)
    assert goodput(simulate([world] * 2000, AutoPlanner(world.lanes), 1)) >= CLOSE * best_fixed(world)


def learn(planner: AutoPlanner, rounds: int, **told: Any) -> None:
    """Plan rounds of full acceptance, each before the one before it is learned from."""
    group = group_of(1)
    planned = planner.plan(group, MAX_LENGTHS)
    for _ in range(rounds):
        following = planner.plan(group, MAX_LENGTHS)
        count = planned[group[0]].asked_count
        calls = {MODEL: DraftCall(1, count, count, 0)} if count else {}
        row = RowReport(count, count, count + 1, DraftSource.DRAFT if count else None, MODEL, group[0], [RIGHT])
        report = RoundReport([row], 0.01, HopTime(), HopTime(), None, None, draft_calls=calls, **told)
        planner.observe(planned, report, 0.01)
        planned = following


FAR = replace(PAIR, hop_s=0.02, verify_s=0.03, verified_token_s=0.0001, acceptance=0.3)


@pytest.mark.parametrize("prepared_share", [0.0, 0.7])
def test_a_far_draft_is_asked_where_what_it_prepares_makes_up_for_its_way(prepared_share: float) -> None:
    world = replace(FAR, prepared_share=prepared_share)
    pays = best_fixed(world) > 1.05 * world.goodput(0)
    assert pays == (prepared_share > 0)
    assert reached(world, rounds=1000, settled=500) >= CLOSE


def test_a_round_counts_for_the_count_with_which_it_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is planned before it is learned from: the last round of each trial was taken for one of the best."""
    seen, observe = [], _Search.observe

    def noted(*args: Any, **named: Any) -> None:
        seen.append(named["count"])
        observe(*args, **named)

    monkeypatch.setattr(_Search, "observe", noted)
    learn(AutoPlanner(1), 2 * WINDOW)
    assert seen == [FIRST_COUNTS[0]] * WINDOW + [FIRST_COUNTS[1]] * WINDOW


def test_a_count_that_cannot_be_the_best_is_not_measured_first() -> None:
    dear = replace(PAIR, draft_token_s=10 * PAIR.draft_token_s)
    assert FIRST_COUNTS[2] == max(FIRST_COUNTS)
    assert FIRST_COUNTS[2] not in [one.count for one in simulate([dear] * 10 * WINDOW, AutoPlanner(1), 1)]


def test_a_draft_that_is_never_right_is_asked_no_more() -> None:
    world = replace(PAIR, acceptance=0, group_size=4)
    settled = simulate([world] * 1000, AutoPlanner(1), 1)[-SETTLED_ROUNDS:]
    assert sum(one.count > 0 for one in settled) <= WINDOW  # an occasional trial


@pytest.mark.parametrize("group_size", [1, pytest.param(8, marks=pytest.mark.long)])
def test_a_draft_that_becomes_right_is_asked_again(group_size: int) -> None:
    bad = replace(PAIR, acceptance=0, draft_token_s=0.001, verify_s=0.01, group_size=group_size)
    good = replace(bad, acceptance=0.9)
    rounds = simulate([bad] * 3000 + [good] * 2500, AutoPlanner(1), 1)
    assert goodput(rounds[1000:3000]) >= CLOSE * bad.goodput(0)
    assert goodput(rounds[-5 * SETTLED_ROUNDS :]) >= NEAR * max(map(good.goodput, COUNTS))


@pytest.mark.parametrize("group_size", [1, 8])
def test_a_draft_that_becomes_ten_times_as_slow_is_soon_asked_for_less(group_size: int) -> None:
    world = replace(PAIR, group_size=group_size)
    slow = replace(world, draft_token_s=10 * world.draft_token_s)
    settled = simulate([world] * 1000 + [slow] * 800, AutoPlanner(1), 1)[-600:]
    assert goodput(settled) >= 0.95 * slow.goodput(0)


def test_each_of_the_first_counts_is_measured_before_any_is_preferred() -> None:
    """Or nearly: drafts that are not worth their price are left out even then."""
    chosen = [one.count for one in simulate([PAIR] * len(FIRST_COUNTS) * WINDOW, AutoPlanner(1), 1)]
    for number, count in enumerate(FIRST_COUNTS):
        own = chosen[number * WINDOW : (number + 1) * WINDOW]
        assert all(0.75 * count <= one <= count for one in own)


HEADS = replace(PAIR, heads_count=3, heads_acceptance=0.7, heads_token_s=0.0004)
WITH_HEADS = {
    "cheap heads beside a draft that is seldom right": replace(HEADS, acceptance=0.32),
    "cheap heads beside a slow draft": replace(HEADS, draft_token_s=0.009),
    "heads that are never right": replace(HEADS, heads_acceptance=0.0),
    "heads that are never right beside a draft that is seldom right": replace(
        HEADS, heads_acceptance=0.0, acceptance=0.32
    ),
    # 0.89: they were asked in every second round, as if they saved what the draft saves already
    "heads that are nearly as good as a draft that is asked": replace(
        HEADS, acceptance=0.85, heads_acceptance=0.75, heads_token_s=0.0011, verify_s=0.004
    ),
    "heads that cost more than they bring": replace(HEADS, acceptance=0.32, heads_token_s=0.006),
    "heads that answer nothing": replace(HEADS, heads_answer=False),
    "heads that answer nothing beside a draft that is seldom right": replace(
        HEADS, heads_answer=False, acceptance=0.32
    ),
}
"""Worlds in which the target's heads are much better than the draft, or much worse."""
HEADS_AT_8 = ("cheap heads beside a draft that is seldom right", "heads that answer nothing")


@pytest.mark.parametrize(("name", "group_size"), at_sizes(WITH_HEADS, HEADS_AT_8))
def test_heads_are_asked_where_they_are_best_and_not_paid_for_elsewhere(name: str, group_size: int) -> None:
    world = replace(WITH_HEADS[name], group_size=group_size, life_rounds=48 // group_size)
    assert reached(world, seeds=range(2), rounds=1200, settled=600) >= CLOSE


@pytest.mark.parametrize(("is_right", "group_size"), [(False, 1), (True, 8)])
def test_in_the_end_trials_of_all_kinds_lose_less_than_one_and_a_half_percent(is_right: bool, group_size: int) -> None:
    """So much is what sources cost that are never right. Times do not vary: 0.019 and 0.022 were lost."""
    world = replace(HEADS, group_size=group_size, life_rounds=50, jitter=0.0, spike_share=0.0)
    if not is_right:
        world = replace(world, acceptance=0.0, heads_acceptance=0.0)
    assert reached(world, seeds=[0], rounds=4000, settled=2000) >= 0.985


def test_heads_that_are_not_worth_it_are_asked_now_and_then_and_noticed_when_they_are() -> None:
    lost = replace(HEADS, heads_answer=False, acceptance=0.3, verify_s=0.02)
    back = replace(lost, heads_answer=True, heads_acceptance=0.9)
    rounds = simulate([lost] * 1000 + [back] * 1500, AutoPlanner(1, HEADS.heads_count), 1)
    assert goodput(rounds[500:1000]) >= 0.97 * lost.goodput(0)
    assert goodput(rounds[-500:]) >= CLOSE * best_fixed(back)


CALLED = replace(
    PAIR,
    acceptance=0.75,
    group_size=8,
    life_rounds=4,
    verify_s=0.004,
    hop_s=0.0012,
    draft_token_s=0.0012,
    verified_token_s=0.00017,
    heads_count=5,
    heads_acceptance=0.88,
    heads_token_s=0.0002,
    heads_call_s=0.0012,
)
"""Heads that give 1.7 times as much as anything else does; costs as measured with the built-in pair."""
VARYING = {
    "little": (replace(CALLED, jitter=0.3, spike_share=0.02, spread=0.1), CLOSE),
    "much": (replace(CALLED, jitter=0.6, spike_share=0.05, spread=0.1), NEAR),
}
"""How much times vary, and the least share of the best fixed goodput."""


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("little", [1, 11]),
        ("much", [1, 6]),
        pytest.param("little", range(12), marks=pytest.mark.long),
        pytest.param("much", range(12), marks=pytest.mark.long),
    ],
)
def test_heads_that_pay_are_used_though_times_vary(name: str, seeds: Sequence[int]) -> None:
    """A few slow rounds made them seem dear, and nothing put it right: these shares were 0.91, 0.92, 0.71 and 0.71."""
    world, least = VARYING[name]
    for seed in seeds:
        rounds = simulate([world] * 1200, AutoPlanner(1, world.heads_count), seed)
        assert goodput(rounds[200:]) >= least * best_fixed(world), seed


class Watched(AutoPlanner):
    """Notes how many tokens the heads are asked for in each round."""

    def __init__(self, heads_count: int) -> None:
        super().__init__(1, heads_count)
        self.heads_counts: list[int] = []

    def observe(self, wishes: Mapping[Generation, Wish], report: RoundReport, cycle_s: float) -> None:
        super().observe(wishes, report, cycle_s)
        self.heads_counts.append(report.heads_count)


@pytest.mark.parametrize("group_size", [1, 8])
def test_heads_that_are_never_right_are_hardly_ever_asked(group_size: int) -> None:
    world = replace(CALLED, acceptance=0.1, group_size=group_size, heads_acceptance=0.0, jitter=0.6, spike_share=0.05)
    planner = Watched(world.heads_count)
    simulate([world] * 2000, planner, 1)
    assert fmean(count > 0 for count in planner.heads_counts[500:]) < 0.03


def test_heads_that_pay_in_part_are_left_out_now_and_then_and_for_good_when_they_no_longer_pay() -> None:
    """Trials of more drafts are no reason to have none of none."""
    world = replace(CALLED, acceptance=0.1, heads_acceptance=0.5, heads_call_s=0.0005, jitter=0.2)
    dear = replace(world, heads_token_s=0.003)
    planner = Watched(world.heads_count)
    rounds = simulate([world] * 1500 + [dear] * 1500, planner, 1)
    usual = planner.heads_counts[300:1500]
    assert 5 < sum(count == 0 for count in usual) < 0.1 * len(usual)
    assert fmean(0 < count < 8 * world.heads_count for count in usual) > 0.8
    assert fmean(count == 0 for count in planner.heads_counts[-1000:]) > 0.95
    assert goodput(rounds[-1000:]) >= CLOSE * best_fixed(dear)


class Exploring(AutoPlanner):
    """Asks the draft and the heads at random for a while, so that both are known well."""

    def __init__(self, heads_count: int, seed: int) -> None:
        super().__init__(1, heads_count)
        self._heads_count = heads_count
        self._rng = random.Random(seed)
        self.explores = True

    def plan(self, group: Sequence[Generation], max_lengths: Mapping[str, int]) -> dict[Generation, Wish]:
        wishes = super().plan(group, max_lengths)
        for wish in wishes.values() if self.explores else ():
            wish.asked_count, wish.draft_model = self._rng.choice([0, 4, 8]), MODEL
            wish.propose_count = self._rng.choice([0, self._heads_count])
        return wishes


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_draft_is_asked_where_what_is_at_hand_promises_more_in_the_time(seed: int) -> None:
    """The heads drafted for a trial: to ask the draft too would cost more time than its better drafts save.

    A planner that had not explored knew dear heads too little: of 16 seeds this held for 3, of which the test had one.
    """
    planner, (generation,) = Exploring(3, seed), group_of(1)
    world = replace(HEADS, acceptance=0.85, heads_acceptance=0.75, heads_token_s=0.005)
    simulate([world] * 400, planner, seed)
    planner.explores = False
    generation.heads_draft = None
    without = [planner.plan([generation], MAX_LENGTHS)[generation].asked_count for _ in range(3 * WINDOW)]
    generation.heads_draft = HeadsDraft(len(generation.token_ids), (RIGHT,) * 3, asked_count=3)
    beside = [planner.plan([generation], MAX_LENGTHS)[generation] for _ in range(3 * WINDOW)]
    assert sum(count > 0 for count in without) > 2 * WINDOW
    assert sum(wish.asked_count > 0 for wish in beside) < WINDOW  # a trial of another count may be due
    assert all(len(wish.token_ids) == 3 for wish in beside)


@pytest.mark.parametrize("planner", [FixedPlanner(4, 3), AutoPlanner(1, 3)], ids=["fixed", "auto"])
def test_heads_draft_for_generations_that_are_too_long_for_a_better_draft_service(planner: DraftPlanner) -> None:
    """`auto` counted on drafts that never came, and asked the target's heads for none."""
    group = group_of(2)
    simulate([replace(HEADS, group_size=2, acceptance=0.95, heads_acceptance=0.7)] * 400, planner, 1)
    able, too_long = ([planner.plan(group, {MODEL: length}) for _ in range(3 * WINDOW)] for length in (1000, 1))
    assert any(wish.asked_count for wishes in able for wish in wishes.values())
    assert not any(wish.asked_count for wishes in too_long for wish in wishes.values())
    assert all(any(wish.propose_count for wish in wishes.values()) for wishes in too_long[2 * WINDOW :])


def test_a_draft_that_is_away_is_not_waited_for() -> None:
    planner, group = AutoPlanner(1), group_of(2)
    for _ in range(1000):
        assert not any(wish.asked_count for wish in planner.plan(group, {}).values())


def test_no_sequence_has_more_drafts_than_its_client_wants() -> None:
    planner, group = AutoPlanner(1), group_of(2)
    group[0].max_draft_count = 1
    for _ in range(100):
        wishes = planner.plan(group, MAX_LENGTHS)
        counts = [wish.asked_count for wish in wishes.values()]
        assert counts[0] <= 1
        rows = [
            RowReport(count, count, count + 1, DraftSource.DRAFT if count else None, MODEL, one)
            for one, count in zip(group, counts, strict=True)
        ]
        call = DraftCall(2, max(counts), sum(counts), 0)
        report = RoundReport(rows, 1.0, HopTime(), HopTime(), None, None, draft_calls={MODEL: call})
        planner.observe(wishes, report, 1.0)
    assert counts[1] > 1


@given(usual=st.floats(0, 1), accepted=st.integers(0, 5))
def test_one_round_hardly_moves_what_others_made_likely_and_many_do(usual: float, accepted: int) -> None:
    acceptance = Acceptance()
    acceptance.add(accepted, 5)
    assert abs(acceptance.rate(usual) - usual) <= 5 / (PRIOR_WEIGHT + 5) + 0.01
    for _ in range(200):
        acceptance.add(accepted, 5)
    own = accepted / min(accepted + 1, 5)
    asked = min(accepted + 1, 5) / (1 - ROUND_MEMORY)
    assert abs(acceptance.rate(usual) - own) <= PRIOR_WEIGHT / (PRIOR_WEIGHT + asked) + 0.01


def test_each_place_of_a_draft_has_its_own_acceptance() -> None:
    places = PlaceAcceptance(4)
    for accepted in (2, 2, 2, 0) * 100:
        places.age()
        places.add(accepted, 3)
    first, second, third, fourth = places.survival()
    assert first == pytest.approx(0.75, abs=0.02)
    assert second == pytest.approx(0.75, abs=0.03)
    assert third + fourth < 0.05
