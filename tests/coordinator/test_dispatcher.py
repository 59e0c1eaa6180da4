"""Several fake targets: placement, moves when one goes away, and waiting while there is none."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from coordinator.rounds.scheduler import LOSSES_TO_FAIL
from coordinator.wiring import Clocks
from paceline.errors import CallTimedOut, Overloaded, PeerFailed, PeerUnavailable
from paceline.types import (
    CacheDescription,
    ModelDescription,
    ReplicaState,
    Verdicts,
    VerifyRow,
)
from tests.coordinators import dispatching
from tests.fakes.dispatches import output, submit, until, whole
from tests.fakes.model_services import Clock, FakeDrafter, FakeVerifier, WithHeads

KILLED = PeerUnavailable("killed")


def dying(after: int) -> FakeVerifier:
    """Return a target that is away from a certain call on."""

    def die(number: int) -> None:
        if number > after:
            verifier.away = KILLED

    verifier = FakeVerifier(die)
    return verifier


async def test_requests_go_to_the_target_with_the_fewest_generations_and_then_the_emptier_cache() -> None:
    full, empty = FakeVerifier(), FakeVerifier()
    full.description = with_cache(full, used_bytes=50)
    empty.description = with_cache(empty, used_bytes=10)
    async with dispatching([], [full, empty], batch_size=8) as running:
        requests = [submit(running, (n,)) for n in range(5, 8)]
        assert [one.sequence_count for one in running.dispatcher.describe()] == [1, 2]
        together = submit(running, (9,), completion_count=4)
        assert [one.sequence_count for one in running.dispatcher.describe()] == [5, 2]
        assert [await output(one) for one in requests] == [whole((n,)) for n in range(5, 8)]
        assert len([piece async for piece in together.stream.pieces() if piece.finish]) == 4
    assert not full.token_ids
    assert not empty.token_ids


def with_cache(verifier: FakeVerifier, used_bytes: int) -> ModelDescription:
    cache = CacheDescription(max_length=1000, prefill_chunk_tokens=16, capacity_bytes=100, used_bytes=used_bytes)
    return replace(verifier.description, cache=cache)


@settings(max_examples=20)
@given(
    deaths=st.lists(st.integers(0, 12), min_size=1, max_size=LOSSES_TO_FAIL - 1),
    lanes=st.integers(1, 2),
    batch_size=st.integers(1, 5),
)
@example(deaths=[12, 9], lanes=2, batch_size=4)  # one death counted twice if the other lane took its generation
def test_outputs_are_the_targets_own_whichever_targets_die_while_one_lives(
    deaths: list[int], lanes: int, batch_size: int
) -> None:
    async def run() -> None:
        survivor, drafter = FakeVerifier(), FakeDrafter(0.7)
        verifiers = [dying(after) for after in deaths]
        async with dispatching([drafter], [*verifiers, survivor], lanes=lanes, batch_size=batch_size) as running:
            requests = [submit(running, (n, n)) for n in range(4, 16)]
            assert await asyncio.gather(*map(output, requests)) == [whole((n, n)) for n in range(4, 16)]
            for verifier, replica in zip(verifiers, running.targets, strict=False):
                verifier.away = None  # it comes back and is told to free its sequences
                verifier.before = lambda number: None
                await replica.look()
        assert not any(one.token_ids for one in (*verifiers, survivor, drafter))

    asyncio.run(run())


async def test_a_full_queue_refuses_with_a_time_to_retry_and_loses_nothing_accepted() -> None:
    async with dispatching([FakeDrafter(0.5)], [FakeVerifier()], batch_size=1, queue_limit=1) as running:
        accepted = [submit(running, (n,)) for n in (5, 6)]
        with pytest.raises(Overloaded) as refusal:
            submit(running, (7,))
        assert refusal.value.retry_after_s > 0
        assert [await output(one) for one in accepted] == [whole((n,)) for n in (5, 6)]


async def test_generations_of_a_dead_target_come_before_newer_ones() -> None:
    first, second = dying(after=2), FakeVerifier()
    async with dispatching([], [first, second], batch_size=2) as running:
        running.targets[1].lose(KILLED)
        old = [submit(running, (n,)) for n in (5, 6)]
        await until(lambda: old[0].generations[0].usage.round_count == 2)
        await running.targets[1].look()
        await until(lambda: running.dispatcher.describe()[0].state is ReplicaState.DOWN)
        new = submit(running, (7,))
        outputs = [await output(one) for one in (*old, new)]
    assert outputs == [whole((n,)) for n in (5, 6, 7)]
    served = [row.sequence_id for call in second.calls for row in call]
    assert list(dict.fromkeys(served)) == [one.generations[0].sequence_id for one in (*old, new)]
    assert running.dispatcher.moved_count == 2


async def test_lines_of_what_fails_and_of_what_moves_name_the_requests() -> None:
    """They told how many, and nobody knew whose they were."""

    def harm(number: int) -> None:
        if number == 1:
            raise PeerFailed("broken")
        if number > 3:
            first.away = KILLED

    first, names = FakeVerifier(harm), ["five", "six"]
    with capture_logs() as logs:
        async with dispatching([], [first, FakeVerifier()], batch_size=2) as running:
            running.targets[1].lose(KILLED)
            requests = [submit(running, (n,)) for n in (5, 6)]
            for request, name in zip(requests, names, strict=True):
                request.request_id = name
            await until(lambda: running.dispatcher.describe()[0].state is ReplicaState.DOWN)
            await running.targets[1].look()
            assert [await output(one) for one in requests] == [whole((n,)) for n in (5, 6)]
    told = {one["event"]: sorted(one["requests"]) for one in logs if "requests" in one}
    assert told == {"a group failed": names, "sequences move": names}


async def test_with_no_target_left_generations_wait_for_one_and_go_on_there() -> None:
    verifier = dying(after=3)
    async with dispatching([FakeDrafter(0.5)], [verifier], batch_size=2) as running:
        requests = [submit(running, (n,)) for n in (5, 6, 7)]
        await until(lambda: not running.targets[0].is_up)
        late = submit(running, (8,))
        assert running.dispatcher.waiting_count == 4
        verifier.away, verifier.before = None, lambda number: None
        verifier.evict()  # it was restarted
        await running.targets[0].look()
        assert [await output(one) for one in (*requests, late)] == [whole((n,)) for n in (5, 6, 7, 8)]
    assert not verifier.token_ids


async def test_a_request_of_more_outputs_than_may_wait_is_told_how_many_it_has() -> None:
    """It was told that none of four waited, and to try again."""
    verifier = FakeVerifier()
    async with dispatching([], [verifier], batch_size=2, queue_limit=4) as running:
        verifier.away = PeerUnavailable("gone")
        running.targets[0].lose(PeerUnavailable("gone"))
        with pytest.raises(Overloaded, match="no room for 5 more: 0 of at most 4"):
            submit(running, (5,), completion_count=5)


async def test_what_waits_for_a_target_too_long_is_told_so_and_the_queue_stays_bounded() -> None:
    clock = Clock()
    async with dispatching([], [dying(after=1)], clocks=Clocks(clock), target_wait_s=60, queue_limit=3) as running:
        early = submit(running, (5,))
        await until(lambda: not running.targets[0].is_up)
        clock.advance(50)
        later = submit(running, (6,))
        submit(running, (7,))
        with pytest.raises(Overloaded):
            submit(running, (8,))
        clock.advance(20)
        running.dispatcher.expire()
        with pytest.raises(PeerUnavailable, match="no target service was there for 60 s"):
            await output(early)
        assert not later.generations[0].ended
        running.dispatcher.abandon(later)
        assert running.dispatcher.waiting_count == 1


async def test_time_in_the_queue_of_a_target_that_served_is_no_time_without_a_target() -> None:
    clock, verifier = Clock(), FakeVerifier()
    async with dispatching([], [verifier], clocks=Clocks(clock), target_wait_s=60, batch_size=1) as running:
        served, queued = submit(running, (5,)), submit(running, (6,))
        clock.advance(100)
        verifier.away = PeerUnavailable("gone")
        running.targets[0].lose(PeerUnavailable("gone"))
        await until(lambda: running.dispatcher.live_count == 0)
        clock.advance(60 - 1)
        running.dispatcher.expire()
        assert not any(one.generations[0].ended for one in (served, queued))
        clock.advance(1)
        running.dispatcher.expire()
        for one in (served, queued):
            with pytest.raises(PeerUnavailable, match="no target service was there for 60 s"):
                await output(one)


async def test_a_draining_target_gives_its_generations_to_another_and_is_told_to_free_them() -> None:
    leaving, staying = FakeVerifier(), FakeVerifier()
    async with dispatching([], [leaving, staying]) as running:
        requests = [submit(running, (n,)) for n in (5, 6, 7, 8)]
        await until(lambda: bool(leaving.token_ids))
        leaving.is_draining = True
        await running.targets[0].look()
        await until(lambda: running.dispatcher.describe()[1].sequence_count == 4)
        await until(lambda: not leaving.token_ids)
        calls = len(leaving.calls)
        assert [await output(one) for one in requests] == [whole((n,)) for n in (5, 6, 7, 8)]
        assert len(leaving.calls) == calls


@pytest.mark.parametrize("is_killed", [False, True], ids=["drained", "killed"])
@pytest.mark.parametrize("draft_count", [2, "auto"])
async def test_a_target_without_heads_goes_on_with_what_one_with_heads_began(
    draft_count: int | str, *, is_killed: bool
) -> None:
    leaving, staying = WithHeads(), FakeVerifier()
    staying.away = KILLED
    async with dispatching([], [leaving, staying], draft="none", draft_count=draft_count) as running:
        request = submit(running, (5,), 60)
        generation = request.generations[0]
        await until(lambda: generation.heads_draft is not None and bool(generation.heads_draft.token_ids))
        staying.away = None
        await running.targets[1].look()
        leaving.away = KILLED if is_killed else None
        leaving.is_draining = not is_killed
        await running.targets[0].look()
        assert await output(request) == whole((5,), 60)
    assert staying.calls


async def test_a_draining_target_goes_on_with_what_it_has_while_there_is_no_other() -> None:
    leaving, late = FakeVerifier(), FakeVerifier()
    late.away = KILLED
    async with dispatching([], [leaving, late]) as running:
        request = submit(running, (5,), 60)
        await until(lambda: request.generations[0].usage.round_count == 2)
        leaving.is_draining = True
        await running.targets[0].look()
        await until(lambda: request.generations[0].usage.round_count == 4)
        waiting = submit(running, (6,))
        assert [one.sequence_count for one in running.dispatcher.describe()] == [1, 0]
        late.away = None
        await running.targets[1].look()
        assert [await output(request), await output(waiting)] == [whole((5,), 60), whole((6,))]
        assert late.calls


async def test_a_stalled_call_is_given_up_when_its_replica_is_found_down() -> None:
    class Stalled(FakeVerifier):
        async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
            await asyncio.Event().wait()
            raise AssertionError

    stalled, other = Stalled(), FakeVerifier()
    async with dispatching([], [stalled, other], batch_size=2) as running:
        requests = [submit(running, (n,)) for n in (5, 6)]
        await until(lambda: running.dispatcher.describe()[0].sequence_count == 1)
        stalled.away = CallTimedOut("no answer")
        for _ in range(2):
            await running.targets[0].look()
        assert [await output(one) for one in requests] == [whole((n,)) for n in (5, 6)]


async def test_a_generation_that_kills_every_target_is_stopped_before_it_stops_the_others() -> None:
    poison = (13, 13)

    def die_of_poison(verifier: FakeVerifier) -> None:
        if any(row.token_ids[:2] == poison for row in verifier.calls[-1]):
            raise KILLED

    verifiers = [FakeVerifier(), FakeVerifier()]
    for verifier in verifiers:
        verifier.before = lambda _, verifier=verifier: die_of_poison(verifier)  # type: ignore[misc]
    async with dispatching([], verifiers, batch_size=8) as running:
        poisoned, *others = [submit(running, prompt) for prompt in (poison, *((n, n) for n in range(4, 12)))]
        outputs = asyncio.gather(*map(output, others))
        while not (outputs.done() and poisoned.generations[0].ended):
            await asyncio.sleep(0)
            for replica in running.targets:
                if not replica.is_up:
                    await replica.look()  # it was started again
        assert await outputs == [whole((n, n)) for n in range(4, 12)]
        with pytest.raises(PeerUnavailable, match="the target was lost 3 times while it served this"):
            await output(poisoned)


async def test_an_abandoned_generation_is_found_wherever_it_is() -> None:
    verifiers = [FakeVerifier(), FakeVerifier()]
    async with dispatching([], verifiers, batch_size=1) as running:
        requests = [submit(running, (n,), 900) for n in range(4, 10)]
        await until(lambda: all(verifier.token_ids for verifier in verifiers))
        for request in requests:
            running.dispatcher.abandon(request)
        await until(lambda: running.dispatcher.live_count == running.dispatcher.waiting_count == 0)
    assert not any(verifier.token_ids for verifier in verifiers)
