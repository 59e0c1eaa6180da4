"""Draft replicas behind their circuits, as one drafter: choice of replica, time limits, and failures."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from coordinator.drafting.guarded_draft import (
    FIRST_TIMEOUT_S,
    LATE_S,
    LATE_TO_FAIL,
    LEAST_TIMEOUT_S,
    TIMEOUT_WORTHS,
    GuardedDraft,
)
from coordinator.drafting.replicated_drafter import ReplicatedDrafter
from coordinator.protocols import Deadline
from coordinator.replicas.circuit import FAILURES_TO_OPEN, FIRST_PAUSE_S, Circuit
from coordinator.replicas.clients import RemoteDrafter
from coordinator.replicas.replica import Replica
from coordinator.rounds.auto_planner import AutoPlanner
from coordinator.rounds.draft_worth import DraftWorth
from coordinator.rounds.fixed_planner import FixedPlanner
from coordinator.rounds.round_report import RoundReport, RowReport
from coordinator.rounds.wishes import DraftPlanner
from paceline.checks import check_row_count
from paceline.codec.versions import VERSION
from paceline.errors import (
    CallTimedOut,
    PacelineError,
    PeerFailed,
    PeerUnavailable,
    PrefixNotCached,
    WrongAnswer,
)
from paceline.tasks import side_by_side
from paceline.types import (
    CircuitState,
    DraftingOptions,
    DraftSource,
    GenerationRequest,
    HopTime,
    Proposal,
    Proposals,
    ProposeRow,
    ReplicaState,
    TokenIds,
)
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer
from paceline.wire import open_channel
from tests.coordinators import collect, dispatching, fits
from tests.fakes.dispatches import submit, whole
from tests.fakes.draft_servers import draft_server
from tests.fakes.model_services import Clock, FakeDrafter, FakeVerifier, continuation

ROW = ProposeRow("a", 0, (5, 6), 3)
WORTH_S = 1.0
PATIENT = Deadline(worth_s=WORTH_S)


class Guarded:
    """A draft replica whose calls take as long, or fail, as a test says."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.took_s = 0.0
        self.error: PacelineError | None = None
        self.remote = FakeDrafter(1.0, before=self._before)
        self.replica = Replica("draft:1", self.remote, fits)
        self.circuit = Circuit(self.clock, jitter=lambda: 1.0)
        self.draft = GuardedDraft(self.replica, self.circuit, self.clock)

    def _before(self, _: int) -> None:
        self.clock.advance(self.took_s)
        if self.error:
            raise self.error

    async def ask(self, deadline: Deadline = PATIENT) -> Proposals | PacelineError:
        """Ask for drafts; return the failure if there are none."""
        try:
            return await self.draft.propose([ROW], deadline)
        except PacelineError as error:
            return error


@pytest.fixture
async def guarded() -> Guarded:
    one = Guarded()
    await one.replica.look()
    return one


async def test_a_call_may_take_what_drafts_can_be_worth_several_times_over(guarded: Guarded) -> None:
    for deadline in (Deadline(), Deadline(worth_s=0.0), Deadline(worth_s=10.0), Deadline(timeout_s=0.5, worth_s=10.0)):
        assert isinstance(await guarded.ask(deadline), Proposals)
    assert [one.timeout_s for one in guarded.remote.deadlines] == [
        FIRST_TIMEOUT_S,
        LEAST_TIMEOUT_S,
        10.0 * TIMEOUT_WORTHS,
        0.5,
    ]


async def test_a_call_that_times_out_opens_the_circuit_and_the_replica_is_looked_at(guarded: Guarded) -> None:
    guarded.error = CallTimedOut("no answer")
    assert await guarded.ask() is guarded.error
    assert guarded.circuit.state is CircuitState.OPEN
    assert not guarded.replica.is_up
    guarded.error = None
    guarded.clock.advance(FIRST_PAUSE_S)
    # The pause alone is not enough: a cheap background check spares a round the wait for a trial.
    assert not guarded.draft.is_usable
    await guarded.replica.look()
    assert guarded.draft.is_usable
    assert isinstance(await guarded.ask(), Proposals)
    assert guarded.circuit.state is CircuitState.CLOSED


async def test_a_call_whose_requests_have_no_more_time_says_nothing_of_the_draft(guarded: Guarded) -> None:
    guarded.error = CallTimedOut("no answer")
    assert await guarded.ask(Deadline(timeout_s=0.1, worth_s=WORTH_S)) is guarded.error
    assert guarded.circuit.state is CircuitState.CLOSED
    assert guarded.replica.is_up


@pytest.mark.parametrize(
    ("worth_s", "took_s", "is_hung"),
    [(WORTH_S, 3.9, False), (0.0, 0.1, False), (0.01, 1.0, True), (None, 1.0, True)],
)
async def test_a_draft_that_hangs_until_its_requests_have_no_more_time_is_asked_no_more(
    guarded: Guarded, worth_s: float | None, took_s: float, is_hung: bool
) -> None:
    """Its health was good and requests had less time than a call may take: each of them failed for its drafts."""
    guarded.error, guarded.took_s = CallTimedOut("no answer"), took_s
    assert await guarded.ask(Deadline(timeout_s=took_s, worth_s=worth_s)) is guarded.error
    assert (guarded.circuit.state is CircuitState.OPEN) is is_hung
    assert guarded.replica.is_up is not is_hung


async def test_two_failures_in_a_row_open_the_circuit_and_nothing_is_asked_until_it_lets_a_trial_through(
    guarded: Guarded,
) -> None:
    guarded.error = PeerFailed("the model raised an error")
    for _ in range(2):
        assert await guarded.ask() is guarded.error
    assert isinstance(await guarded.ask(), PeerUnavailable)
    assert len(guarded.remote.calls) == 2
    assert guarded.replica.is_up


async def test_an_answer_that_cannot_be_true_is_a_failure(guarded: Guarded) -> None:
    class Liar(FakeDrafter):
        async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
            return Proposals([next(lies)])

    lies = iter([Proposal((1, 2, 3, 4), 5), Proposal((1, 2), 9)])
    replica = Replica("draft:1", Liar(1.0), fits)
    await replica.look()
    draft = GuardedDraft(replica, guarded.circuit, guarded.clock)
    for _ in range(2):
        with pytest.raises(PeerFailed):
            await draft.propose([ROW], PATIENT)
    assert guarded.circuit.state is CircuitState.OPEN


class GarbageInTurn(DraftServiceServicer):
    """Every second answer has no result."""

    def __init__(self) -> None:
        self.count = 0

    async def ProposeTokens(
        self, requests: AsyncIterator[pb.ProposeTokensRequest], context: object
    ) -> AsyncIterator[pb.ProposeTokensResponse]:
        async for request in requests:
            self.count += 1
            results = [pb.ProposeTokensResult(sequence_id=row.sequence_id, cached_length=2) for row in request.rows]
            yield pb.ProposeTokensResponse(results=results if self.count % 2 else [], wire_version=VERSION)


async def test_a_draft_whose_every_second_answer_is_wrong_is_asked_no_more() -> None:
    clock = Clock()
    async with draft_server(GarbageInTurn()) as (servicer, address), open_channel(address) as channel:  # type: ignore[abstract]
        replica = Replica("draft:1", RemoteDrafter(channel, 60.0), fits)
        replica.state = ReplicaState.UP
        draft = GuardedDraft(replica, Circuit(clock, lambda: 1.0), clock)
        for _ in range(50):
            with suppress(WrongAnswer, PeerUnavailable):
                await draft.propose([ROW], PATIENT)
    assert 2 * FAILURES_TO_OPEN <= servicer.count < 4 * FAILURES_TO_OPEN


async def test_a_draft_that_is_slower_than_it_helps_counts_as_failed(guarded: Guarded) -> None:
    guarded.took_s = WORTH_S * 1.1
    for _ in range(LATE_TO_FAIL - 1):
        await guarded.ask()
    assert guarded.draft.is_usable
    await guarded.ask()
    assert not guarded.draft.is_usable
    # One trial shows at once whether it is still slow.
    states = []
    for took_s in (WORTH_S * 1.1, WORTH_S * 0.9):
        guarded.took_s = took_s
        guarded.clock.advance(10 * FIRST_PAUSE_S)
        await guarded.ask()
        states.append(guarded.circuit.state)
    assert states == [CircuitState.OPEN, CircuitState.CLOSED]


async def test_a_draft_that_is_too_slow_now_and_then_is_tried_soon_each_time(guarded: Guarded) -> None:
    """As if it hung, it was asked for nothing for up to half a minute after each time."""
    for _ in range(8):
        guarded.took_s = WORTH_S * 1.1
        for _ in range(LATE_TO_FAIL):
            await guarded.ask()
        assert guarded.circuit.state is CircuitState.OPEN
        guarded.took_s = WORTH_S * 0.9
        guarded.clock.advance(FIRST_PAUSE_S)
        assert isinstance(await guarded.ask(), Proposals)


async def test_late_calls_between_ones_in_time_are_forgiven_and_very_fast_ones_never_late(guarded: Guarded) -> None:
    for number in range(3 * LATE_TO_FAIL):
        guarded.took_s = WORTH_S * (0.5 if number % LATE_TO_FAIL == 0 else 2)
        await guarded.ask()
    guarded.took_s = 0.9 * LATE_S
    for _ in range(2 * LATE_TO_FAIL):
        await guarded.ask(Deadline(worth_s=0.0))
    assert guarded.circuit.state is CircuitState.CLOSED


@pytest.mark.parametrize(("planner", "stays"), [(FixedPlanner(8), False), (AutoPlanner(lanes=2), True)])
async def test_auto_may_try_more_drafts_than_pay(guarded: Guarded, planner: DraftPlanner, stays: bool) -> None:
    """Late trial calls opened the circuit: nothing was drafted then, nor learned about drafting."""
    worth = DraftWorth(2, planner.leeway)
    worth.observe(report(verify_s=0.02, tokens=4, drafted_count=4))
    guarded.took_s = 0.14
    for _ in range(LATE_TO_FAIL):
        await guarded.ask(Deadline(worth_s=worth.seconds))
    assert guarded.draft.is_usable == stays


def report(verify_s: float, tokens: int, drafted_count: int) -> RoundReport:
    source = DraftSource.DRAFT if drafted_count else None
    rows = [RowReport(drafted_count, max(0, tokens - 1), tokens, source)] * 2
    return RoundReport(rows, 0, HopTime(), HopTime(executed_s=verify_s), None, None)


@pytest.mark.parametrize(("lanes", "worth_s"), [(1, 2 * 0.1), (2, 3 * 0.1), (8, 3 * 0.1)])
def test_drafting_is_worth_the_rounds_it_saves(lanes: int, worth_s: float) -> None:
    """3 tokens a round, 0.1 s a verify call: with overlapping lanes only the slower hop counts."""
    worth = DraftWorth(lanes, leeway=1)
    worth.observe(report(0.1, tokens=1, drafted_count=0))
    assert worth.seconds is None
    worth.observe(report(0.1, tokens=3, drafted_count=5))
    assert worth.seconds == pytest.approx(worth_s)


def test_a_draft_that_is_never_right_is_worth_nothing() -> None:
    worth = DraftWorth(lanes=1, leeway=1)
    worth.observe(report(0.1, tokens=1, drafted_count=5))
    assert worth.seconds == 0


async def replicated(*remotes: FakeDrafter) -> tuple[ReplicatedDrafter, list[Replica[FakeDrafter]]]:
    clock = Clock()
    drafter = ReplicatedDrafter(lambda replica: GuardedDraft(replica, Circuit(clock, lambda: 1.0), clock))
    replicas = [Replica(f"draft:{n}", one, fits, drafter.changed) for n, one in enumerate(remotes)]
    for replica in replicas:
        drafter.changed(replica)
        await replica.look()
    return drafter, replicas


def rows(*names: str, base_length: int = 0) -> list[ProposeRow]:
    return [ProposeRow(name, base_length, (5, 6), 3) for name in names]


async def test_rows_spread_over_the_replicas_and_stick_to_theirs() -> None:
    one, other = FakeDrafter(1.0), FakeDrafter(1.0)
    drafter, _ = await replicated(one, other)
    answers = await drafter.propose(rows("a", "b", "c", "d"), PATIENT)
    assert [isinstance(result, Proposal) for result in answers.results] == [True] * 4
    await drafter.propose(rows("d", "b", "a"), PATIENT)
    named = [[{row.sequence_id for row in call} for call in draft.calls] for draft in (one, other)]
    assert named == [[{"a", "c"}, {"a"}], [{"b", "d"}, {"b", "d"}]]


async def test_a_part_that_fails_costs_its_own_rows_their_drafts_and_the_next_call_goes_elsewhere() -> None:
    one, other = FakeDrafter(1.0), FakeDrafter(1.0)
    drafter, replicas = await replicated(one, other)
    await drafter.propose(rows("a", "b"), PATIENT)
    one.away = PeerUnavailable("killed")
    results = (await drafter.propose(rows("a", "b"), PATIENT)).results
    assert isinstance(results[0], PeerUnavailable)
    assert isinstance(results[1], Proposal)
    # The prefix that the row relies on is cached at the lost replica.
    (moved,) = (await drafter.propose(rows("a", base_length=1), PATIENT)).results
    assert isinstance(moved, PrefixNotCached)
    (whole,) = (await drafter.propose(rows("a"), PATIENT)).results
    assert isinstance(whole, Proposal)
    one.away = None
    await replicas[0].look()
    assert not one.token_ids
    drafter.owe(["a", "b"])
    await drafter.release()
    assert not other.token_ids


async def test_with_every_part_failed_the_call_fails_and_without_a_replica_there_is_nothing_to_ask_for() -> None:
    draft = FakeDrafter(1.0)
    drafter, (replica,) = await replicated(draft)
    assert drafter.max_length == 1000
    draft.away = PeerUnavailable("killed")
    with pytest.raises(PeerUnavailable, match="killed"):
        await drafter.propose(rows("a"), PATIENT)
    assert (drafter.max_length, drafter.is_usable) == (0, False)
    draft.away = None
    await replica.look()
    assert drafter.is_usable


async def test_a_drafter_takes_as_many_rows_as_its_replica_that_takes_fewest() -> None:
    few, many = FakeDrafter(1.0), FakeDrafter(1.0)
    few.description = replace(few.description, max_rows=8)
    drafter, replicas = await replicated(few, many)
    assert drafter.max_rows == 8
    few.away = PeerUnavailable("killed")
    replicas[0].lose(few.away)
    assert drafter.max_rows == many.description.max_rows


class Strict(FakeDrafter):
    """A draft service that refuses calls of more rows than it says it takes."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(1.0)
        self.description = replace(self.description, max_rows=max_rows)

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        check_row_count(len(rows), self.description.max_rows)
        return await super().propose(rows, deadline)


@pytest.mark.parametrize(("max_rows", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (4, [3, 2]), (5, [5])])
async def test_a_service_that_takes_fewer_rows_in_a_call_is_asked_in_as_few_as_that_takes(
    max_rows: int, sizes: list[int]
) -> None:
    draft = Strict(max_rows)
    drafter, _ = await replicated(draft)
    for base_length in (0, 1):
        asked = [ProposeRow(name, base_length, (place, 6), 3) for place, name in enumerate("abcde")]
        with capture_logs() as logs:
            results = (await drafter.propose(asked, PATIENT)).results
        told = [one["max_rows"] for one in logs if one["log_level"] == "warning"]
        assert told == [max_rows] * (len(sizes) > 1 and not base_length), "it is told once"
        assert [result.draft_token_ids for result in results if isinstance(result, Proposal)] == [
            tuple(whole((*draft.token_ids[row.sequence_id][:base_length], *row.token_ids), 3)) for row in asked
        ]
    assert [len(call) for call in draft.calls] == 2 * sizes


async def test_the_calls_for_rows_of_a_group_count_as_one_failure() -> None:
    draft = Strict(1)
    drafter, (replica,) = await replicated(draft)
    draft.away = PeerFailed("broken")
    for failure_count in range(1, FAILURES_TO_OPEN + 1):
        with pytest.raises(PeerFailed, match="broken"):
            await drafter.propose(rows("a", "b", "c"), PATIENT)
        assert (drafter.describe()[0].circuit is CircuitState.OPEN) is (failure_count == FAILURES_TO_OPEN)
    assert replica.is_up


@pytest.mark.parametrize("max_rows", [1, 3])
async def test_every_request_of_a_group_has_drafts_of_a_service_that_takes_fewer_rows(max_rows: int) -> None:
    """Each of its calls was refused, so nobody had any."""
    async with dispatching([Strict(max_rows)], [FakeVerifier()], draft_count=3) as running:
        drafting = DraftingOptions((DraftSource.DRAFT,))
        requests = [submit(running, (n, n), 12, drafting=drafting) for n in range(4, 8)]
        async with asyncio.timeout(60):
            finishes = [piece.finish for _, piece in await asyncio.gather(*map(collect, requests))]
        assert all(one and one.usage.accepted_count == 9 for one in finishes)


async def test_a_draining_replica_frees_what_it_holds_and_gets_nothing_new() -> None:
    leaving, staying = FakeDrafter(1.0), FakeDrafter(1.0)
    drafter, replicas = await replicated(leaving, staying)
    await drafter.propose(rows("a", "b"), PATIENT)
    leaving.is_draining = True
    await replicas[0].look()
    assert not leaving.token_ids
    await drafter.propose(rows("a", "b"), PATIENT)
    assert len(leaving.calls) == 1
    drafter.left(replicas[0])
    assert [one.address for one in drafter.describe()] == ["draft:1"]


class Late(FakeDrafter):
    """Serves a call once it is `open`, however long it was under way."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.open = asyncio.Event()

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        await self.open.wait()
        return await super().propose(rows, deadline)


async def test_a_draining_replica_frees_what_a_call_under_way_cached_after_it_was_told() -> None:
    """Nobody knew any more that it was there, so a service that stops waited for it, and another kept it for long."""
    leaving = Late()
    drafter, (replica,) = await replicated(leaving)
    call = asyncio.create_task(drafter.propose(rows("a", "b"), PATIENT))
    await asyncio.sleep(0)
    leaving.is_draining = True
    await replica.look()
    leaving.open.set()
    await call
    assert leaving.token_ids
    await replica.look()
    assert not leaving.token_ids


async def generate(drafters: Sequence[FakeDrafter], change: Callable[[int], None]) -> None:
    """Serve requests, calling `change` at each verify call; their outputs must be the target's own."""
    prompts = [(n, n) for n in range(4, 12)]
    async with dispatching(drafters, [FakeVerifier(change)], draft_count=4) as running:
        requests = [running.admission.admit(GenerationRequest(TokenIds(prompt), 30)) for prompt in prompts]
        for request in requests:
            running.dispatcher.submit(request)
        outputs = [
            [token.token_id async for piece in one.stream.pieces() for token in piece.tokens] for one in requests
        ]
        assert outputs == [continuation(prompt, 30) for prompt in prompts]
        for drafter, replica in zip(drafters, running.draft_replicas, strict=True):
            drafter.away = None
            await replica.look()
    assert not any(drafter.token_ids for drafter in drafters)


@pytest.mark.parametrize("error", [PeerUnavailable("killed"), CallTimedOut("stopped"), PeerFailed("broken")])
async def test_drafts_that_fail_midway_change_no_output_and_are_owed_what_they_are_to_free(
    error: PacelineError,
) -> None:
    one, other = FakeDrafter(0.8), FakeDrafter(0.8, seed=1)

    def change(number: int) -> None:
        one.away = error if 3 <= number < 9 else None
        other.away = error if 6 <= number < 12 else None

    await generate([one, other], change)


async def test_a_draft_that_joins_late_is_taken_in() -> None:
    late = FakeDrafter(1.0)
    late.away = PeerUnavailable("not started")
    async with dispatching([late], [FakeVerifier()], draft_count=4) as running:
        assert running.drafts.description is None
        for joined in (False, True):
            if joined:
                late.away = None
                await running.draft_replicas[0].look()
            only_draft = DraftingOptions((DraftSource.DRAFT,))
            asked = GenerationRequest(TokenIds((5, 5)), 10, ignore_end_tokens=True, drafting=only_draft)
            request = running.admission.admit(asked)
            running.dispatcher.submit(request)
            async with asyncio.timeout(60):
                pieces = [piece async for piece in request.stream.pieces()]
            assert pieces[-1].finish
            assert bool(pieces[-1].finish.usage.drafted_count) is joined
    assert not late.token_ids


class Mute(DraftServiceServicer):
    """Never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def ProposeTokens(
        self, requests: AsyncIterator[pb.ProposeTokensRequest], context: object
    ) -> AsyncIterator[pb.ProposeTokensResponse]:
        async for _ in requests:
            self.asked.set()
        yield pb.ProposeTokensResponse()


class ClosedUnder(FakeDrafter):
    """Asks over gRPC; its channel is closed during the first call."""

    def __init__(self, address: str, asked: asyncio.Event) -> None:
        super().__init__(1.0)
        self._channel = open_channel(address)
        self._remote = RemoteDrafter(self._channel, 60.0)
        self._asked = asked

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        async with side_by_side() as group:
            group.create_task(self._close())
            return await self._remote.propose(rows, deadline)

    async def _close(self) -> None:
        await self._asked.wait()
        await self._channel.close()


@pytest.mark.review
async def test_a_draft_whose_channel_is_closed_under_its_call_costs_drafts_and_no_round() -> None:
    """Review C7: the lane ended as if cancelled, and all generations were computed anew."""
    async with (
        draft_server(Mute()) as (mute, address),  # type: ignore[abstract]
        dispatching([ClosedUnder(address, mute.asked)], [FakeVerifier()]) as running,
    ):
        request = running.admission.admit(GenerationRequest(TokenIds((5, 6)), 20))
        running.dispatcher.submit(request)
        assert (await collect(request))[0] == continuation((5, 6), 20)
        assert running.dispatcher.moved_count == 0
        assert not running.draft_replicas[0].is_up
