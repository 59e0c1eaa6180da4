"""Targets that report good health but fail, and targets that join: no request suffers. Review C3, C4, C6."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from coordinator.placement.guarded_target import FAILURES_TO_OPEN, UsualTime
from coordinator.wiring import Clocks
from paceline.errors import CallTimedOut, NoChoice, PacelineError, PeerFailed, PeerUnavailable
from paceline.types import CircuitState, ModelIdentity, Proposals, Verdict, Verdicts, VerifyRow
from tests.coordinators import Dispatched, dispatching
from tests.fakes.dispatches import output, submit, until, whole
from tests.fakes.model_services import CHUNK_TOKENS, Clock, FakeDrafter, FakeVerifier, HeldVerifier
from tests.scrapes import value

pytestmark = pytest.mark.review


def failing(error: PacelineError) -> FakeVerifier:
    """Return a target whose health is good and whose calls all fail."""

    def fail(_: int) -> None:
        raise error

    return FakeVerifier(fail)


class NoChoices(FakeVerifier):
    """Fails every row of its answers."""

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        await super().verify(rows, timeout_s)
        return Verdicts([NoChoice("logits are not finite") for _ in rows])


class Slow(FakeVerifier):
    """Lets other tasks run for a while before it answers."""

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        for _ in range(20):
            await asyncio.sleep(0)
        return await super().verify(rows, timeout_s)


class Hung(FakeVerifier):
    """Never answers; a call ends at its timeout, by the clock of a test."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        self.calls.append(list(rows))
        assert timeout_s is not None
        await asyncio.sleep(0)
        self._clock.advance(timeout_s)
        raise CallTimedOut("deadline exceeded")


class WrongInTurn(FakeVerifier):
    """Every second answer has a row too few."""

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        verdicts = await super().verify(rows, timeout_s)
        return verdicts if len(self.calls) % 2 else replace(verdicts, results=verdicts.results[1:])


async def test_a_target_whose_every_second_answer_is_wrong_is_given_up() -> None:
    """It was asked on and on: each answer that could be true closed its circuit."""
    clock, wrong, healthy = Clock(), WrongInTurn(), FakeVerifier()
    async with dispatching([], [wrong, healthy], batch_size=4, clocks=Clocks(circuits=clock)) as running:
        with capture_logs() as lines:
            for first in range(0, 200, 8):
                requests = [submit(running, prompt(n)) for n in range(first, first + 8)]
                assert await asyncio.gather(*map(output, requests)) == [
                    whole(prompt(n)) for n in range(first, first + 8)
                ]
        assert running.dispatcher.describe()[0].circuit is CircuitState.OPEN
    assert len(wrong.calls) < 4 * FAILURES_TO_OPEN
    given_up = [one for one in lines if one["event"] == "a group failed" and one["target_given_up"]]
    assert len(given_up) == 1


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    "broken",
    [lambda: failing(PeerFailed("broken")), lambda: failing(PeerUnavailable("broken")), NoChoices],
    ids=["internal", "unavailable", "rows"],
)
async def test_a_target_that_answers_errors_beside_a_healthy_one_fails_no_request(broken, lanes: int) -> None:  # type: ignore[no-untyped-def]
    """The broken target had the least load, so it drew every request to itself."""
    black_hole, healthy = broken(), FakeVerifier()
    async with dispatching([FakeDrafter(0.6)], [black_hole, healthy], lanes=lanes, batch_size=8) as running:
        looks = asyncio.create_task(look_on(running))
        requests = [submit(running, prompt(n)) for n in range(100)]
        assert await asyncio.gather(*map(output, requests)) == [whole(prompt(n)) for n in range(100)]
        looks.cancel()


def prompt(number: int) -> tuple[int, ...]:
    return number % 40 + 5, number // 40 + 5


async def look_on(running: Dispatched) -> None:
    """Check the targets again and again, as their watches do."""
    while True:
        for replica in running.targets:
            await replica.look()
        await asyncio.sleep(0)


async def test_a_hung_target_costs_the_requests_of_its_first_round_and_no_others() -> None:
    """The target's health is good and every request has a deadline: no call ever lasted long enough to lose it."""
    clock = Clock()
    hung, healthy = Hung(clock), FakeVerifier()
    async with dispatching([], [hung, healthy], batch_size=8, clocks=Clocks(clock)) as running:
        requests = [submit(running, prompt(n), deadline_s=clock() + 10.0 + n) for n in range(100)]
        outputs = await asyncio.gather(*map(output, requests), return_exceptions=True)
    lost = [one for one in outputs if isinstance(one, BaseException)]
    assert {type(one) for one in lost} <= {CallTimedOut}
    assert len(lost) <= len(hung.calls[0]) == 8
    assert len(hung.calls) == 1
    assert value(running.watched.registry, "rounds_failed_total") == 1
    kept = [(n, one) for n, one in enumerate(outputs) if not isinstance(one, BaseException)]
    assert all(one == whole(prompt(n)) for n, one in kept)


async def test_an_open_target_is_tried_again_with_one_request_and_used_when_that_is_well() -> None:
    broken = failing(PeerFailed("broken"))
    async with dispatching([], [broken], batch_size=4) as running:
        requests = [submit(running, (n,)) for n in range(5, 13)]
        await until(lambda: running.dispatcher.describe()[0].circuit is CircuitState.OPEN)
        assert len(broken.calls) == FAILURES_TO_OPEN
        await until(lambda: running.dispatcher.live_count == 0)
        broken.before = lambda number: None
        served = len(broken.calls)
        while running.dispatcher.waiting_count:
            running.dispatcher.distribute()  # the dispatcher's own check comes four times a second
            await asyncio.sleep(0.001)
        outputs = await asyncio.gather(*map(output, requests), return_exceptions=True)
        assert running.dispatcher.describe()[0].circuit is CircuitState.CLOSED
    assert len(broken.calls[served]) == 1
    # There is no other target: the first two requests failed alone, before all were known to fail.
    failed = [one for one in outputs if isinstance(one, BaseException)]
    assert len(failed) < FAILURES_TO_OPEN


class Spares(FakeVerifier):
    """Chooses no token after one prompt, which takes it two calls to read."""

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        verdicts = await super().verify(rows, timeout_s)
        for index, row in enumerate(rows):
            if isinstance(verdicts.results[index], Verdict) and self.token_ids[row.sequence_id][0] == POISON:
                verdicts.results[index] = NoChoice("logits are not finite")
        return verdicts


POISON = 13


@pytest.mark.parametrize("prompt_count", [2, CHUNK_TOKENS + 4])
async def test_a_request_that_every_target_fails_is_failed_and_does_not_go_round(prompt_count: int) -> None:
    targets = [Spares(), Spares()]
    async with dispatching([], targets, batch_size=4) as running:
        poisoned = submit(running, (POISON,) * prompt_count)
        others = [submit(running, prompt(n)) for n in range(3)]
        for _ in range(2000):
            await asyncio.sleep(0)
        assert [one.ended for one in poisoned.generations] == [True]
        with pytest.raises(NoChoice):
            await output(poisoned)
        assert await asyncio.gather(*map(output, others)) == [whole(prompt(n)) for n in range(3)]


async def test_requests_that_break_any_call_keep_others_waiting_for_a_few_pauses_only() -> None:
    """With an open circuit the oldest requests were tried first, one by one, with pauses that doubled."""

    def break_on_poison(_: int) -> None:
        if any(row.base_length == 0 and row.token_ids[0] == POISON for row in verifier.calls[-1]):
            raise PeerFailed("the model raised an error")

    verifier, monotonic = FakeVerifier(break_on_poison), Clock()
    async with dispatching([], [verifier], batch_size=4, clocks=Clocks(circuits=monotonic)) as running:
        poisoned = [submit(running, (POISON, n)) for n in range(12)]
        healthy = [submit(running, prompt(n)) for n in range(4)]
        began_s = monotonic()
        while not all(one.ended for request in healthy for one in request.generations):
            for _ in range(20):
                await asyncio.sleep(0)
            monotonic.advance(0.05)
            running.dispatcher.distribute()
            assert monotonic() < began_s + 5.0, "a pause for a few of them, and no longer ones"
        assert await asyncio.gather(*map(output, healthy)) == [whole(prompt(n)) for n in range(4)]
        for request in poisoned:
            running.dispatcher.abandon(request)


async def test_a_target_that_is_lost_with_a_call_under_way_comes_back_on_trial() -> None:
    """Where a network loses large messages alone, it got all requests again as soon as it answered a check."""
    verifier, monotonic = HeldVerifier(0), Clock()
    async with dispatching([], [verifier], batch_size=4, clocks=Clocks(circuits=monotonic)) as running:
        requests = [submit(running, prompt(n)) for n in range(4)]
        for _ in range(20):
            await asyncio.sleep(0)
        await lost_and_found(running, verifier)
        assert running.dispatcher.describe()[0].circuit is CircuitState.OPEN
        verifier.open.set()
        monotonic.advance(1.0)
        running.dispatcher.distribute()
        assert await asyncio.gather(*map(output, requests)) == [whole(prompt(n)) for n in range(4)]
        assert len(verifier.calls[0]) == 1
        await until(lambda: running.dispatcher.live_count == 0)
        await lost_and_found(running, verifier)
        assert running.dispatcher.describe()[0].circuit is CircuitState.CLOSED, "it owed nothing"


async def test_a_target_in_whose_place_another_process_answers_is_not_on_trial() -> None:
    """Where a new process takes over an address, as behind a Service, it was on trial for what the old one owed."""
    verifier = HeldVerifier(0)
    async with dispatching([], [verifier], batch_size=4) as running:
        requests = [submit(running, prompt(n)) for n in range(4)]
        await until(lambda: running.dispatcher.live_count == 4)
        verifier.description = replace(verifier.description, identity=ModelIdentity("", "another"))
        while running.dispatcher.moved_count == 0:
            await running.targets[0].look()
            await asyncio.sleep(0)
        assert running.dispatcher.describe()[0].circuit is CircuitState.CLOSED
        verifier.open.set()
        assert await asyncio.gather(*map(output, requests)) == [whole(prompt(n)) for n in range(4)]


async def lost_and_found(running: Dispatched, verifier: FakeVerifier) -> None:
    """Let the first target answer no checks until it is down, and then again."""
    verifier.away = CallTimedOut("no answer")
    while running.targets[0].is_up:
        await running.targets[0].look()
    await until(lambda: running.dispatcher.live_count == 0)
    verifier.away = None
    await running.targets[0].look()


async def test_a_trial_is_one_output_of_a_request_of_several() -> None:
    verifier, monotonic = failing(PeerFailed("broken")), Clock()
    async with dispatching([], [verifier], batch_size=4, clocks=Clocks(circuits=monotonic)) as running:
        await opened(running)
        submit(running, (9,), completion_count=4)
        count = len(verifier.calls)
        monotonic.advance(1.0)
        running.dispatcher.distribute()
        await until(lambda: len(verifier.calls) > count)
        assert len(verifier.calls[count]) == 1


class Computing(FakeVerifier):
    """Takes 10 ms for a token, by the clock of a test, and at most its timeout."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        wanted_s = 0.01 * sum(len(row.token_ids) + len(row.draft_token_ids) for row in rows)
        if timeout_s is not None and wanted_s > timeout_s:
            self._clock.advance(timeout_s)
            raise CallTimedOut("deadline exceeded")
        self._clock.advance(wanted_s)
        return await super().verify(rows, timeout_s)


async def test_long_prompts_with_short_deadlines_do_not_make_a_healthy_target_look_hung() -> None:
    """A call took 1 s for its hundred tokens, while earlier calls had one or two."""
    clock = Clock()
    async with dispatching([], [Computing(clock)], clocks=Clocks(clock)) as running:
        await output(submit(running, (5,)))
        for n in range(4):
            with pytest.raises(CallTimedOut):
                await output(submit(running, (7, n) * 50, deadline_s=clock() + 0.9))
            assert running.dispatcher.describe()[0].circuit is CircuitState.CLOSED
        assert await output(submit(running, (6,))) == whole((6,))


async def test_a_trial_that_comes_to_no_call_makes_way_for_the_next() -> None:
    """The circuit stayed half open, and the target got nothing any more."""
    verifier, monotonic = failing(PeerFailed("broken")), Clock()
    async with dispatching([FakeDrafter(0.5)], [verifier], batch_size=4, clocks=Clocks(circuits=monotonic)) as running:
        await opened(running)
        count, drafter = len(verifier.calls), running.draft_replicas[0].remote
        proposes, drafter.propose = drafter.propose, broken_in_itself  # type: ignore[method-assign, assignment]
        monotonic.advance(1.0)
        with pytest.raises(PeerFailed, match="unexpectedly"):
            await output(submit(running, (5,)))
        assert len(verifier.calls) == count
        drafter.propose, verifier.before = proposes, lambda number: None  # type: ignore[method-assign]
        assert await output(submit(running, (6,))) == whole((6,))


async def test_a_trial_whose_target_is_lost_before_its_call_makes_way_for_the_next() -> None:
    """The circuit stayed half open when the target came back: it got nothing any more, and requests waited for it."""
    verifier, monotonic, asked = failing(PeerFailed("broken")), Clock(), asyncio.Event()

    async def never(*_: object) -> Proposals:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with dispatching([FakeDrafter(0.5)], [verifier], batch_size=4, clocks=Clocks(circuits=monotonic)) as running:
        await opened(running)
        drafter = running.draft_replicas[0].remote
        proposes, drafter.propose = drafter.propose, never  # type: ignore[method-assign, assignment]
        monotonic.advance(1.0)
        request = submit(running, (5,))
        await asked.wait()
        running.targets[0].lose(PeerUnavailable("restarted"))
        await until(lambda: running.dispatcher.live_count == 0)
        drafter.propose, verifier.before = proposes, lambda number: None  # type: ignore[method-assign]
        await running.targets[0].look()
        monotonic.advance(1.0)
        running.dispatcher.distribute()
        await until(lambda: running.dispatcher.describe()[0].circuit is CircuitState.CLOSED)
        assert await output(request) == whole((5,))


async def test_a_trial_whose_client_goes_before_its_round_makes_way_for_the_next() -> None:
    verifier, monotonic = failing(PeerFailed("broken")), Clock()
    async with dispatching([], [verifier], batch_size=4, clocks=Clocks(circuits=monotonic)) as running:
        await opened(running)
        monotonic.advance(1.0)
        running.dispatcher.abandon(submit(running, (5,)))
        verifier.before = lambda number: None
        assert await output(submit(running, (6,))) == whole((6,))


def test_a_call_that_took_long_once_does_not_excuse_a_hung_target_for_ever() -> None:
    usual = UsualTime()
    usual.add(10, 5.0)
    assert not usual.is_far_exceeded(10, 15.0)
    for _ in range(200):
        usual.add(10, 0.1)
    assert usual.is_far_exceeded(10, 1.0)


async def opened(running: Dispatched) -> None:
    """Open the circuit of the first target."""
    requests = [submit(running, (n + 5,)) for n in range(FAILURES_TO_OPEN)]
    await until(lambda: running.dispatcher.describe()[0].circuit is CircuitState.OPEN)
    await until(lambda: running.dispatcher.live_count == 0)
    for request in requests:
        running.dispatcher.abandon(request)


async def broken_in_itself(*_: object) -> Proposals:
    raise ValueError("a fault of the coordinator's own")


async def test_what_waits_is_shared_with_a_target_that_joins_and_the_oldest_come_first() -> None:
    """Review C4: with 60 queued, a second target joined and got no call."""
    first, second = Slow(), Slow()
    second.away = PeerUnavailable("not there yet")
    async with dispatching([], [first, second], batch_size=8) as running:
        requests = [submit(running, prompt(n)) for n in range(60)]
        await until(lambda: bool(first.calls))
        assert not second.calls
        second.away = None
        await running.targets[1].look()
        calls = len(first.calls)
        await until(lambda: len(second.calls) == 2 or len(first.calls) > calls + 2)
        assert len(first.calls) <= calls + 2, "it has its share within two rounds"
        assert [len(call) for call in second.calls] == [8, 8]
        assert await asyncio.gather(*map(output, requests)) == [whole(prompt(n)) for n in range(60)]
    numbers = {one.generations[0].sequence_id: n for n, one in enumerate(requests)}
    for verifier in (first, second):
        served = [numbers[row.sequence_id] for call in verifier.calls for row in call]
        begun = list(dict.fromkeys(served))
        assert begun == sorted(begun)


async def test_the_requests_of_several_completions_stay_together() -> None:
    async with dispatching([], [FakeVerifier(), FakeVerifier()], batch_size=4) as running:
        together = submit(running, (9,), completion_count=4)
        assert [one.sequence_count for one in running.dispatcher.describe()] == [4, 0]
        submit(running, (5,))
        assert [one.sequence_count for one in running.dispatcher.describe()] == [4, 1]
        assert len([piece async for piece in together.stream.pieces() if piece.finish]) == 4


async def test_a_draft_is_told_to_free_what_is_abandoned_while_no_target_is_there() -> None:
    """Review C6: abandoned sequences were kept for ever, and no drafts were made ahead until a restart."""
    verifier, drafter = FakeVerifier(), FakeDrafter(0.5)
    async with dispatching([drafter], [verifier], batch_size=2) as running:
        requests = [submit(running, (n,), 900) for n in (5, 6, 7)]
        await until(lambda: len(drafter.token_ids) == 2)
        running.targets[0].lose(PeerUnavailable("killed"))
        await until(lambda: running.dispatcher.live_count == 0)
        assert running.residency.held_count == 2
        for request in requests:
            running.dispatcher.abandon(request)
        await until(lambda: not drafter.token_ids)
        assert running.residency.held_count == 0
        assert running.dispatcher.waiting_count == 0


async def test_it_is_told_when_no_target_serves_and_when_one_does_again() -> None:
    """Review C11: a coordinator without a usable target kept saying that it serves."""
    verifier, told = FakeVerifier(), list[bool]()

    async with dispatching([], [verifier]) as running:
        telling = asyncio.create_task(running.dispatcher.tell_serving(told.append))
        await until(lambda: told == [True])
        running.targets[0].lose(PeerUnavailable("killed"))
        await until(lambda: told == [True, False])
        await running.targets[0].look()
        await until(lambda: told == [True, False, True])
        telling.cancel()


async def test_a_coordinator_serves_again_when_its_only_target_may_be_tried_and_nobody_waits() -> None:
    """It said NOT_SERVING for ever: where that keeps requests away, as a Service does, none came to try the target."""
    clock, broken, told = Clock(), failing(PeerFailed("broken")), list[bool]()

    async with dispatching([], [broken], clocks=Clocks(circuits=clock)) as running:
        telling = asyncio.create_task(running.dispatcher.tell_serving(told.append))
        requests = [submit(running, (n,)) for n in range(5, 5 + FAILURES_TO_OPEN)]
        await until(lambda: told == [True, False])
        for request in requests:
            running.dispatcher.abandon(request)
        clock.advance(60)
        running.dispatcher.changed(running.targets[0])
        await until(lambda: told == [True, False, True])
        broken.before = lambda number: None
        assert await output(submit(running, (9,))) == whole((9,))
        running.dispatcher.changed(running.targets[0])
        await until(lambda: running.dispatcher.describe()[0].circuit is CircuitState.CLOSED)
        assert running.dispatcher.is_serving
        telling.cancel()


async def test_a_coordinator_whose_requests_wait_to_try_its_only_target_asks_for_no_more() -> None:
    clock, broken = Clock(), failing(PeerFailed("broken"))
    async with dispatching([], [broken], clocks=Clocks(circuits=clock)) as running:
        for number in range(5, 13):
            submit(running, (number,))
        await until(lambda: running.dispatcher.describe()[0].circuit is CircuitState.OPEN)
        await until(lambda: running.dispatcher.live_count == 0)
        clock.advance(60)
        assert running.dispatcher.waiting_count and not running.dispatcher.is_serving
