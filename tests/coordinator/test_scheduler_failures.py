"""The real loop over fake services that fail, lie and vanish: what continues, what fails, and what clients hear."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from coordinator.door.admission import Admission
from coordinator.protocols import Deadline
from coordinator.rounds import round_verdicts
from coordinator.rounds.fixed_planner import FixedPlanner
from coordinator.rounds.guarded_planner import GuardedPlanner
from coordinator.rounds.prompt_shares import CHUNKS_BROUGHT
from coordinator.rounds.residency import Residency
from coordinator.wiring import Clocks
from paceline.errors import CacheFull, CallTimedOut, PacelineError, PeerFailed, PeerUnavailable
from paceline.types import (
    GenerationRequest,
    Prefilled,
    Proposals,
    ProposeRow,
    RolledBack,
    SequenceLength,
    TokenIds,
    Verdict,
    Verdicts,
    VerifyOutcome,
    VerifyRow,
)
from tests.coordinators import SERVED, collect, generate_all, make_serving, prompts, scheduling, submit
from tests.fakes.model_services import VOCABULARY_SIZE, Clock, FakeDrafter, FakeVerifier, continuation
from tests.scrapes import value
from tests.waits import LIMIT_S

FAILED = GuardedPlanner.failed  # which conftest replaces


async def test_a_draft_that_fails_costs_no_output() -> None:
    def fail(number: int) -> None:
        if number % 2:
            raise PeerUnavailable("the draft is away")

    async with scheduling(FakeDrafter(0.8, before=fail), FakeVerifier()) as (admission, scheduler):
        outputs = await generate_all(admission, scheduler, prompts(8), 30)
    assert outputs == [continuation(prompt, 30) for prompt in prompts(8)]


async def test_evicted_caches_are_rebuilt_from_the_coordinators_tokens() -> None:
    drafter = FakeDrafter(0.8, before=lambda number: drafter.evict() if number % 5 == 0 else None)
    verifier = FakeVerifier(before=lambda number: verifier.evict() if number % 7 == 0 else None)
    async with scheduling(drafter, verifier) as (admission, scheduler):
        outputs = await generate_all(admission, scheduler, prompts(8), 30)
    assert outputs == [continuation(prompt, 30) for prompt in prompts(8)]


async def test_a_row_that_breaks_its_group_fails_alone_and_the_others_go_on() -> None:
    """The model fails on any group with the poisoned generation, which only running alone identifies."""
    poison, clean = (13, 13), prompts(5)

    def break_on_poison(_: int) -> None:
        if any(row.token_ids[:2] == poison for row in verifier.calls[-1]):
            raise PeerFailed("the model raised an error")

    verifier = FakeVerifier(break_on_poison)
    async with scheduling(FakeDrafter(0.5), verifier, batch_size=6) as (admission, scheduler):
        poisoned = admission.admit(GenerationRequest(TokenIds(poison), 20))
        submit(scheduler, poisoned)
        outputs = await generate_all(admission, scheduler, clean, 20)
        with pytest.raises(PeerFailed, match="the model raised an error"):
            await collect(poisoned)
    assert outputs == [continuation(prompt, 20) for prompt in clean]
    assert not verifier.token_ids
    assert [len(call) for call in verifier.calls[:7]] == [6, 1, 1, 1, 1, 1, 1]


class LiesOfCutting(FakeVerifier):
    """Answers each request to cut sequences with something that cannot be true."""

    def __init__(self, answer: Sequence[RolledBack]) -> None:
        super().__init__(capacity_tokens=40)
        self.lie = answer
        self.cut_count = 0

    async def rollback(self, lengths: Sequence[SequenceLength]) -> list[RolledBack | PacelineError]:
        self.cut_count += 1
        return [*self.lie]


@pytest.mark.parametrize("answer", [(), (RolledBack(0, 1),) * 2, (RolledBack(0, -1),)], ids=["no", "two", "negative"])
async def test_a_target_that_lies_of_what_it_cut_costs_no_output(answer: Sequence[RolledBack]) -> None:
    """It ended the coordinator's process, and with it the requests of all targets."""
    verifier = LiesOfCutting(answer)
    async with scheduling(FakeDrafter(0.6), verifier) as (admission, scheduler):
        outputs = await generate_all(admission, scheduler, prompts(4), 20)
    assert outputs == [continuation(prompt, 20) for prompt in prompts(4)]
    assert verifier.cut_count and not verifier.token_ids


async def test_a_wait_for_room_that_others_hold_is_told_once_however_long_it_lasts() -> None:
    """A line a second was written, for as long as another coordinator's sequences filled the cache."""

    def leave(number: int) -> None:
        if number in (6, 12):
            verifier.token_ids.pop("of another", None)
        if number == 8:
            verifier.token_ids["of another"] = [0] * 38

    verifier = FakeVerifier(leave, capacity_tokens=40)
    verifier.token_ids["of another"] = [0] * 39
    with capture_logs() as logs:
        async with scheduling(FakeDrafter(0.5), verifier, draft_count=1) as (admission, scheduler):
            assert await generate_all(admission, scheduler, [(5, 6)], 20) == [continuation((5, 6), 20)]
    assert [one["event"] for one in logs] == ["waiting for room in the target's cache"] * 2


class AbsurdlyFull(FakeVerifier):
    """Says in some calls that rows find no room, for as long and for as many bytes as no target could mean."""

    def _verify(self, row: VerifyRow) -> VerifyOutcome | PacelineError:
        if len(self.calls) in (1, 4):
            return CacheFull("no room", {"missing_bytes": "9" * 5000}, retry_after_s=1e12)
        return super()._verify(row)


async def test_a_target_that_asks_for_a_wait_of_years_holds_no_lane_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lane waited as long as it said, and a number of thousands of digits failed the round."""
    monkeypatch.setattr(round_verdicts, "LONGEST_WAIT_S", 0.0)
    async with scheduling(FakeDrafter(0.5), AbsurdlyFull()) as (admission, scheduler), asyncio.timeout(LIMIT_S):
        assert await generate_all(admission, scheduler, [(5, 6)], 20) == [continuation((5, 6), 20)]


@pytest.mark.parametrize("step", ["plan", "observe"])
async def test_a_planner_that_fails_costs_no_output(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in what was learned from a round failed the round's requests, whose tokens were there already."""

    def fail(*_: object) -> NoReturn:
        raise IndexError("a place that is not there")

    monkeypatch.setattr(GuardedPlanner, "failed", FAILED)
    monkeypatch.setattr(FixedPlanner, step, fail)
    with capture_logs() as logs:
        async with scheduling(FakeDrafter(0.8), FakeVerifier()) as (admission, scheduler):
            outputs = await generate_all(admission, scheduler, prompts(8), 30)
    assert outputs == [continuation(prompt, 30) for prompt in prompts(8)]
    told = [one for one in logs if one["log_level"] == "error"]
    assert [one["error_count"] for one in told] == [2**power for power in range(len(told))]
    assert told and all(isinstance(one["exc_info"], IndexError) for one in told)


async def test_an_answer_that_cannot_be_true_is_not_taken_and_asked_for_again() -> None:
    """A group with a lie runs alone, as after any failure; a generation that alone gets only lies fails."""
    lies: Iterator[VerifyOutcome] = iter(
        [Verdict(9, 1, 9), Verdict(0, VOCABULARY_SIZE, 2), Verdict(0, 1, 7), Prefilled(99)]
    )

    class Liar(FakeVerifier):
        async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
            verdicts = await super().verify(rows, timeout_s)
            if len(rows) > 1 and (lie := next(lies, None)):
                return replace(verdicts, results=[lie, *verdicts.results[1:]])
            return verdicts

    async with scheduling(FakeDrafter(0.5), Liar(), batch_size=4) as (admission, scheduler):
        outputs = await generate_all(admission, scheduler, prompts(8), 20)
    assert outputs == [continuation(prompt, 20) for prompt in prompts(8)]
    assert next(lies, None) is None


async def test_a_call_has_the_time_that_the_last_of_its_requests_has_left() -> None:
    clock = Clock()
    verifier = FakeVerifier(lambda _: clock.advance(1))
    drafter = FakeDrafter(1.0, before=lambda _: clock.advance(2))
    async with scheduling(drafter, verifier, clocks=Clocks(clock)) as (admission, scheduler):
        soon, late = (admission.admit(GenerationRequest(TokenIds((n,)), 8, ignore_end_tokens=True)) for n in (5, 6))
        soon.deadline_s, late.deadline_s = clock() + 10, clock() + 30
        for request in (soon, late):
            submit(scheduler, request)
        await asyncio.gather(collect(soon), collect(late))
        assert [one.timeout_s for one in drafter.deadlines] == [30, 27]
        assert verifier.timeouts_s == [28, 25]
        await generate_all(admission, scheduler, [(5,)], 3)
        assert verifier.timeouts_s[-1] is None


async def test_a_call_that_ends_with_its_requests_deadline_fails_them_and_says_nothing_of_the_target() -> None:
    clock = Clock()

    late: set[int] = set()

    def take_time(number: int) -> None:
        clock.advance(3)
        if number in late:
            clock.advance(7)
            raise CallTimedOut("deadline exceeded")

    verifier, registry = FakeVerifier(take_time), CollectorRegistry()
    async with scheduling(FakeDrafter(1.0), verifier, clocks=Clocks(clock), registry=registry) as (
        admission,
        scheduler,
    ):
        await generate_all(admission, scheduler, [(5,)], 10)
        request = admission.admit(GenerationRequest(TokenIds((5,))))
        request.deadline_s = clock() + 10
        late.add(len(verifier.calls) + 1)
        submit(scheduler, request)
        with pytest.raises(CallTimedOut, match="the request's deadline passed"):
            await collect(request)
        assert await generate_all(admission, scheduler, [(5,)], 10) == [continuation((5,), 10)]
    # An alert says of those that fail that calls to the target do.
    assert value(registry, "rounds_failed_total") == 0
    assert value(registry, "group_size_count") == len(verifier.calls)


async def test_a_call_lasts_no_shorter_because_some_of_its_group_wait_for_their_turn() -> None:
    """The call ended with the time of those in it. The last, which waited, had time: so the target was given up."""
    clock, row_counts = Clock(), list[int]()

    class Slow(FakeVerifier):
        async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
            row_counts.append(len(rows))
            if len(rows) == CHUNKS_BROUGHT and timeout_s is not None:
                clock.advance(timeout_s)
                raise CallTimedOut("deadline exceeded")
            return await super().verify(rows, timeout_s)

    prompts = [tuple(range(5 + number, 45)) for number in range(CHUNKS_BROUGHT + 1)]
    async with scheduling(FakeDrafter(1.0), Slow(), clocks=Clocks(clock), batch_size=8) as (admission, scheduler):
        requests = [admission.admit(GenerationRequest(TokenIds(prompt), 2)) for prompt in prompts]
        for request in requests:
            request.deadline_s = None if request is requests[1] else clock() + 10
            submit(scheduler, request)
        async with asyncio.timeout(10):
            outputs = await asyncio.gather(*map(collect, requests))
    assert [output for output, _ in outputs] == [continuation(prompt, 2) for prompt in prompts]
    assert CHUNKS_BROUGHT in row_counts


async def test_a_call_for_drafts_that_its_requests_deadline_cut_short_is_no_failure_of_the_draft() -> None:
    clock = Clock()

    class Hung(FakeDrafter):
        async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
            assert deadline.timeout_s is not None
            clock.advance(deadline.timeout_s)
            raise CallTimedOut("deadline exceeded")

    class Punctual(FakeVerifier):
        async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
            if timeout_s == 0:
                raise CallTimedOut("deadline exceeded")
            return await super().verify(rows, timeout_s)

    registry = CollectorRegistry()
    async with scheduling(Hung(1.0), Punctual(), clocks=Clocks(clock), registry=registry) as (admission, scheduler):
        request = admission.admit(GenerationRequest(TokenIds((5,))))
        request.deadline_s = clock() + 1
        submit(scheduler, request)
        with pytest.raises(CallTimedOut, match="the request's deadline passed"):
            await collect(request)
    assert value(registry, "draft_failures_total") == value(registry, "rounds_failed_total") == 0
    assert value(registry, "group_size_count") == 1


async def test_a_target_that_is_away_ends_the_rounds_and_the_generations_are_handed_over_in_order() -> None:
    def vanish(number: int) -> None:
        if number == 7:
            verifier.away = PeerUnavailable("killed")

    verifier = FakeVerifier(vanish)
    drafter = FakeDrafter(0.5)
    residency = Residency(drafter)
    scheduler = make_serving(drafter, verifier, batch_size=2, lanes=2, residency=residency).scheduler
    admission = Admission(SERVED, default_max_new_tokens=40)
    request = admission.admit(GenerationRequest(TokenIds((5,)), 900, ignore_end_tokens=True, completion_count=7))
    generations = submit(scheduler, request).generations
    assert await scheduler.run() is verifier.away
    assert sorted(scheduler.give_up(), key=generations.index) == generations
    assert {one.target_cached_length for one in generations} == {0}
    assert sum(one.usage.round_count for one in generations) == 6 * 2
    assert scheduler.pool.live_count == scheduler.pool.waiting_count == 0
    verifier.away = None
    residency.free(generations)
    await residency.close()
