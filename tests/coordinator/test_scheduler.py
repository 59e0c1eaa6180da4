"""The real loop over fake services: the output is the target's own whatever the draft does."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.requests.generation import Generation
from coordinator.rounds.fixed_planner import FixedPlanner
from coordinator.rounds.policies import POLICIES
from coordinator.rounds.residency import Residency
from coordinator.rounds.round_report import RoundReport
from coordinator.rounds.scheduler import Scheduler
from coordinator.rounds.wishes import Wish
from coordinator.wiring import Clocks
from paceline.checks import MOST_LANES
from paceline.errors import PacelineError, PeerFailed
from paceline.types import (
    PAPER_POLICIES,
    CallTiming,
    DraftSource,
    FinishReason,
    GenerationRequest,
    PolicyName,
    Prefilled,
    RolledBack,
    SequenceLength,
    SourceUsage,
    TokenIds,
    Usage,
    Verdict,
    Verdicts,
    VerifyRow,
)
from tests.coordinators import MODEL, SERVED, admission, collect, generate_all, prompts, scheduling, submit
from tests.fakes.model_services import CHUNK_TOKENS, Clock, FakeDrafter, FakeVerifier, continuation


async def run_and_compare(
    skill: float, batch_size: int, draft_count: int, draft_max_length: int, max_new_tokens: int, seed: int
) -> None:
    drafter, verifier = FakeDrafter(skill, seed), FakeVerifier()
    drafter.max_length = draft_max_length
    async with scheduling(drafter, verifier, batch_size=batch_size, draft_count=draft_count) as (
        admission,
        scheduler,
    ):
        outputs = await generate_all(admission, scheduler, prompts(12, seed), max_new_tokens)
    assert outputs == [continuation(prompt, max_new_tokens) for prompt in prompts(12, seed)]
    assert not drafter.token_ids
    assert not verifier.token_ids
    assert all(len(call) <= batch_size for call in verifier.calls)


@settings(max_examples=60)
@given(
    skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    batch_size=st.integers(1, 9),
    draft_count=st.integers(0, 7),
    draft_max_length=st.sampled_from([1, 20, 1000]),
    max_new_tokens=st.integers(1, 40),
    seed=st.integers(0, 10),
)
def test_output_is_the_targets_own_for_any_draft_group_size_and_draft_count(
    skill: float, batch_size: int, draft_count: int, draft_max_length: int, max_new_tokens: int, seed: int
) -> None:
    asyncio.run(run_and_compare(skill, batch_size, draft_count, draft_max_length, max_new_tokens, seed))


async def run_policy(
    policy: str, lanes: int | None, draft_count: int | Literal["auto"], batch_size: int, seed: int
) -> None:
    drafter, verifier = FakeDrafter(0.7, seed), FakeVerifier()
    async with scheduling(
        drafter, verifier, batch_size=batch_size, draft_count=draft_count, policy=policy, lanes=lanes
    ) as (admission, scheduler):
        outputs = await generate_all(admission, scheduler, prompts(25, seed), 30)
    assert outputs == [continuation(prompt, 30) for prompt in prompts(25, seed)]
    assert not drafter.token_ids
    assert not verifier.token_ids
    assert scheduler.statistics.snapshot().committed_count == sum(map(len, outputs))


@settings(max_examples=30)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    lanes=st.none() | st.integers(1, 2),
    draft_count=st.just("auto") | st.integers(0, 6),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 10),
)
def test_output_is_the_targets_own_under_every_policy_with_every_number_of_lanes(
    policy: str, lanes: int | None, draft_count: int | Literal["auto"], batch_size: int, seed: int
) -> None:
    asyncio.run(run_policy(policy, 1 if policy in PAPER_POLICIES else lanes, draft_count, batch_size, seed))


@pytest.mark.parametrize(("lanes", "draft_count"), [(3, 4), (8, "auto"), (MOST_LANES, 0)])
async def test_so_it_is_with_the_lanes_of_a_long_pipeline(lanes: int, draft_count: int | Literal["auto"]) -> None:
    await run_policy("continuous", lanes, draft_count, batch_size=2, seed=1)


async def test_as_many_groups_are_in_flight_as_the_planner_has_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, verifier = FixedPlanner(0, lanes=1), _Together()
    monkeypatch.setattr("coordinator.wiring.FixedPlanner", lambda *count, **lanes: planner)
    async with scheduling(FakeDrafter(1.0), verifier, batch_size=2, lanes=4, draft_count=0) as (admission, scheduler):
        for lanes in (1, 2, 4, 1):
            planner.lane_count = lanes
            verifier.most = 0
            outputs = await generate_all(admission, scheduler, prompts(8, lanes), 30)
            assert outputs == [continuation(prompt, 30) for prompt in prompts(8, lanes)]
            assert verifier.most == lanes


class _Told(FixedPlanner):
    """A planner that remembers how long rounds took."""

    def __init__(self, lanes: int) -> None:
        super().__init__(0, lanes=lanes)
        self.cycles_s: list[float] = []

    def observe(self, wishes: Mapping[Generation, Wish], report: RoundReport, cycle_s: float) -> None:
        super().observe(wishes, report, cycle_s)
        self.cycles_s.append(cycle_s)


class _Ticking(FakeVerifier):
    """Computes for a second in each call."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        self._clock.advance(1.0)
        return replace(await super().verify(rows, timeout_s), timing=CallTiming(0.0, 1.0))


@pytest.mark.parametrize(("lanes", "group_count"), [(1, 1), (1, 2), (2, 1)])
async def test_planners_are_told_the_same_time_of_rounds_whether_groups_take_turns_or_one_is_alone(
    lanes: int, group_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's time from round to round doubles with the second group: prices learned of both fitted neither."""
    planner, clock = _Told(lanes), Clock()
    monkeypatch.setattr("coordinator.wiring.FixedPlanner", lambda *count, **lanes: planner)
    verifier = _Ticking(clock)
    async with scheduling(FakeDrafter(1.0), verifier, batch_size=4, lanes=2, draft_count=0, clocks=Clocks(clock)) as (
        admission,
        scheduler,
    ):
        await generate_all(admission, scheduler, prompts(4 * group_count, 1), 30)
    assert planner.cycles_s[2:] == pytest.approx([2.0] * (len(planner.cycles_s) - 2))


@pytest.mark.parametrize(
    ("lanes", "executed_s", "is_one_group"), [(None, 1.0, True), (None, 0.0, False), (2, 1.0, False)]
)
async def test_rows_that_fit_into_one_group_share_a_round_where_the_target_is_near(
    lanes: int | None, executed_s: float, is_one_group: bool
) -> None:
    """They stayed in the lanes that they had come into, in groups of a few, each for a verify of its own."""
    verifier = _Together()
    verifier.executed_s = executed_s
    told: dict[str, Any] = {"batch_size": 4, "lanes": lanes, "draft_count": 0, "clocks": Clocks(verifier.clock)}
    async with scheduling(FakeDrafter(1.0), verifier, **told) as (admission, scheduler):
        requests = []
        for number in (5, 6):
            request = GenerationRequest(TokenIds((number,) * 3), 60, ignore_end_tokens=True)
            requests.append(submit(scheduler, admission.admit(request)))
            while not verifier.count:
                await asyncio.sleep(0)
        await asyncio.gather(*map(collect, requests))
    assert (sum(len(call) == 2 for call in verifier.calls) > 50) is is_one_group


@pytest.mark.parametrize(("lanes", "is_idle"), [(1, True), (2, False)])
async def test_a_target_is_told_where_no_draft_service_works_beside_it(lanes: int, is_idle: bool) -> None:
    """A verify of drafts left cores to a draft service that waited for it."""
    verifier = FakeVerifier()
    async with scheduling(FakeDrafter(1.0), verifier, batch_size=4, lanes=lanes, draft_count=3) as (
        admission,
        scheduler,
    ):
        await generate_all(admission, scheduler, prompts(4, 1), 20)
    drafted = [row for call in verifier.calls for row in call if row.draft_token_ids]
    assert drafted
    assert {row.draft_is_idle for row in drafted} == {is_idle}


class _Together(FakeVerifier):
    """Counts the calls at a time."""

    count = most = 0
    executed_s = 0.0
    """What it says of each call's time; the rest is the way's."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        """Moves with calls alone."""

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        self.count += 1
        self.most = max(self.most, self.count)
        for _ in range(8):  # another lane may begin
            await asyncio.sleep(0)
        self.count -= 1
        self.clock.advance(0.1)
        verdicts = await super().verify(rows, timeout_s)
        return replace(verdicts, timing=CallTiming(executed_s=self.executed_s))


async def test_full_acceptance_of_k_drafts_yields_k_plus_one_tokens() -> None:
    drafter, verifier = FakeDrafter(skill=1.0), FakeVerifier()
    prompt = (9, 9, 9)
    async with scheduling(drafter, verifier, draft_count=4) as (admission, scheduler):
        request = admission.admit(GenerationRequest(TokenIds(prompt), 10, ignore_end_tokens=True))
        submit(scheduler, request)
        pieces = [piece async for piece in request.stream.pieces()]
    assert pieces[-1].finish is not None
    usage = replace(pieces[-1].finish.usage, queued_s=0.0)
    sources = (SourceUsage(DraftSource.DRAFT, MODEL, 8, 8),)
    assert usage == Usage(3, 10, 8, 8, 2, accepted_counts_by_position=(2, 2, 2, 2), sources=sources)
    accepted = [token.accepted for piece in pieces for token in piece.tokens]
    assert accepted == [True, True, True, True, False] * 2


async def run_within(capacity_tokens: int, batch_size: int, seed: int) -> Scheduler:
    """Serve 12 prompts from a target cache that cannot hold a full batch of them."""
    drafter, verifier = FakeDrafter(0.7, seed), FakeVerifier(capacity_tokens=capacity_tokens)
    async with scheduling(drafter, verifier, batch_size=batch_size) as (admission, scheduler):
        outputs = await generate_all(admission, scheduler, prompts(12, seed), 30)
    assert outputs == [continuation(prompt, 30) for prompt in prompts(12, seed)]
    assert not drafter.token_ids
    assert not verifier.token_ids
    return scheduler


@settings(max_examples=40)
@given(capacity_tokens=st.integers(95, 400), batch_size=st.integers(1, 9), seed=st.integers(0, 10))
def test_a_cache_too_small_for_the_batch_changes_no_output(capacity_tokens: int, batch_size: int, seed: int) -> None:
    asyncio.run(run_within(capacity_tokens, batch_size, seed))


async def test_the_youngest_gives_up_what_is_wanted_and_goes_on_from_the_rest() -> None:
    """The whole sequence was sent again, and its draft's too."""
    drafter, verifier = FakeDrafter(1.0), FakeVerifier(capacity_tokens=60)
    async with scheduling(drafter, verifier, draft_count=0) as (admission, scheduler):
        requests = [
            submit(scheduler, admission.admit(GenerationRequest(TokenIds((n,) * 10), 30, ignore_end_tokens=True)))
            for n in (5, 6)
        ]
        outputs = [(await collect(one))[0] for one in requests]
    assert [len(one) for one in outputs] == [30, 30]
    assert scheduler.statistics.snapshot().preemption_count == 1
    old, young = (one.generations[0].sequence_id for one in requests)
    rows = [row for call in verifier.calls for row in call]
    assert all(len(row.token_ids) == 1 for row in rows if row.sequence_id == old and row.base_length)
    again, *_ = (row for row in rows if row.sequence_id == young and row.base_length and len(row.token_ids) > 1)
    assert again.base_length > 10, "what nobody wanted stayed cached"


async def test_the_youngest_gives_way_though_it_is_in_a_round_of_the_other_lane() -> None:
    """Review C12: the youngest outside any round was taken, which with two lanes is often the older one."""
    verifier, drafter = FakeVerifier(capacity_tokens=60), FakeDrafter(1.0)
    async with scheduling(drafter, verifier, draft_count=0, batch_size=1, lanes=2) as (admission, scheduler):
        requests = [
            submit(scheduler, admission.admit(GenerationRequest(TokenIds((n,) * 10), 30, ignore_end_tokens=True)))
            for n in (5, 6)
        ]
        await asyncio.gather(*map(collect, requests))
    old = requests[0].generations[0].sequence_id
    lengths = [row.base_length for call in verifier.calls for row in call if row.sequence_id == old]
    assert lengths == sorted(lengths), "the older one never lost anything"
    young = requests[1].generations[0].sequence_id
    began, *others = (row.base_length for call in verifier.calls for row in call if row.sequence_id == young)
    assert not began and min(others) >= 10, "the younger one kept what the older one did not lack"


def test_every_policy_that_is_offered_is_there() -> None:
    assert set(POLICIES) == set(get_args(PolicyName))


class SlowToCut(FakeVerifier):
    """Lets other tasks run during a rollback, which always fails."""

    def __init__(self, capacity_tokens: int) -> None:
        super().__init__(capacity_tokens=capacity_tokens)
        self.cut: list[str] = []

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        await asyncio.sleep(0)
        assert not {row.sequence_id for row in rows} & set(self.cut), "it is in a round while it is cut"
        return await super().verify(rows, timeout_s)

    async def rollback(self, lengths: Sequence[SequenceLength]) -> list[RolledBack | PacelineError]:
        self.cut = [one.sequence_id for one in lengths]
        for _ in range(40):
            await asyncio.sleep(0)
        self.cut = []
        raise PeerFailed("it cannot be cut")


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_cut_is_in_no_round_and_leaves_nothing_behind(seed: int) -> None:
    drafter, verifier = FakeDrafter(0.7, seed), SlowToCut(100)
    async with scheduling(drafter, verifier, batch_size=2, lanes=2) as (admission, scheduler):
        outputs = await generate_all(admission, scheduler, prompts(12, seed), 30)
    assert outputs == [continuation(prompt, 30) for prompt in prompts(12, seed)]
    assert not verifier.token_ids


async def test_what_no_target_holds_is_no_victim_for_ever() -> None:
    residency = Residency(FakeDrafter(0.5))
    generation = admission(SERVED).admit(GenerationRequest(TokenIds((5, 6)), 9)).generations[0]
    generation.target_cached_length = 2
    assert await residency.take_back(generation, 0) == 0
    assert generation.target_cached_length == 0


class Counting(FakeVerifier):
    """Counts the tokens it computes and keeps."""

    computed_count = 0

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        verdicts = await super().verify(rows, timeout_s)
        for row, result in zip(rows, verdicts.results, strict=True):
            if isinstance(result, Verdict | Prefilled):
                self.computed_count += result.cached_length - row.base_length
        return verdicts


async def test_no_more_sequences_go_live_than_are_foreseen_to_fit_once_room_was_short() -> None:
    verifier = Counting(capacity_tokens=120)
    async with scheduling(FakeDrafter(1.0), verifier, draft_count=0, batch_size=8) as (admission, scheduler):
        requests = [
            submit(scheduler, admission.admit(GenerationRequest(TokenIds((n,) * 10), 30, ignore_end_tokens=True)))
            for n in range(5, 29)
        ]
        await asyncio.gather(*map(collect, requests))
    assert verifier.computed_count < 1.15 * 24 * 39, "it was 1.35"
    assert scheduler.statistics.snapshot().preemption_count < 10


async def test_a_sequence_alone_waits_for_memory_that_others_hold() -> None:
    verifier = FakeVerifier(capacity_tokens=40)
    verifier.token_ids["of another coordinator"] = [1] * 30

    def free_later(number: int) -> None:
        if number == 3:
            verifier.token_ids.pop("of another coordinator")

    verifier.before = free_later
    async with scheduling(FakeDrafter(0.5), verifier) as (admission, scheduler):
        assert await generate_all(admission, scheduler, [(9,) * 12], 8) == [continuation((9,) * 12, 8)]
    assert scheduler.statistics.snapshot().preemption_count == 0


async def test_a_long_prompt_goes_in_chunks_while_others_go_on() -> None:
    verifier = FakeVerifier()
    long, short = (9,) * (5 * CHUNK_TOKENS), (8, 8)
    async with scheduling(FakeDrafter(1.0), verifier, draft_count=0) as (admission, scheduler):
        outputs = await generate_all(admission, scheduler, [short, long], 12)
    assert outputs == [continuation(short, 12), continuation(long, 12)]
    assert [len(call) for call in verifier.calls[:5]] == [2] * 5


async def test_drafts_wait_until_the_prompt_is_nearly_cached() -> None:
    drafter = FakeDrafter(1.0)
    async with scheduling(drafter, FakeVerifier()) as (admission, scheduler):
        await generate_all(admission, scheduler, [(9,) * (3 * CHUNK_TOKENS)], 5)
    assert len(drafter.calls[0]) == 1
    assert scheduler.statistics.snapshot().round_count - len(drafter.calls) >= 2


async def test_the_draft_keeps_its_cache_between_rounds() -> None:
    drafter, verifier = FakeDrafter(skill=1.0), FakeVerifier()
    async with scheduling(drafter, verifier, draft_count=4) as (admission, scheduler):
        await generate_all(admission, scheduler, [(9, 9, 9)], 30)
    assert [len(row.token_ids) for call in drafter.calls for row in call][1:] == [2] * (len(drafter.calls) - 1)


async def test_an_abandoned_sequence_leaves_both_caches_and_its_place() -> None:
    drafter, verifier = FakeDrafter(0.5), FakeVerifier()
    async with scheduling(drafter, verifier, batch_size=1) as (admission, scheduler):
        gone = admission.admit(GenerationRequest(TokenIds((5, 6)), 900, ignore_end_tokens=True))
        waiting = admission.admit(GenerationRequest(TokenIds((8,)), 10))
        submit(scheduler, gone)
        submit(scheduler, waiting)
        async for _ in gone.stream.pieces():
            break
        gone.generations[0].ended = True
        scheduler.retire(gone.generations)
        assert (await collect(waiting))[0] == continuation((8,), 10)
    assert not drafter.token_ids
    assert not verifier.token_ids
    assert scheduler.pool.live_count == scheduler.pool.waiting_count == 0


async def test_a_request_may_cap_its_drafts_or_turn_them_off() -> None:
    drafter, verifier = FakeDrafter(1.0), FakeVerifier()
    async with scheduling(drafter, verifier, draft_count=5) as (admission, scheduler):
        for cap in (0, 2):
            request = admission.admit(GenerationRequest(TokenIds((5, 5)), 12, max_draft_count=cap))
            submit(scheduler, request)
            assert (await collect(request))[0] == continuation((5, 5), 12)
    assert {row.draft_count for call in drafter.calls for row in call} <= {1, 2}


async def test_output_ends_with_the_end_token_and_says_so() -> None:
    prompt = next(p for p in prompts(50) if len(continuation(p, 100)) < 100)
    async with scheduling(FakeDrafter(1.0), FakeVerifier(), draft_count=7) as (admission, scheduler):
        request = admission.admit(GenerationRequest(TokenIds(prompt), 100))
        submit(scheduler, request)
        output, last = await collect(request)
    assert output == continuation(prompt, 100)
    assert last.finish is not None
    assert last.finish.reason is FinishReason.END_TOKEN
    # The draft is always right, so every draft that counts is accepted, perhaps including the end token.
    assert last.finish.usage.drafted_count == last.finish.usage.accepted_count
