"""Requests over kept streams, over real gRPC: the number of streams, and the effects of failures."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.replicas.clients import RemoteDrafter
from paceline.codec.versions import RELEASES_ALONG
from paceline.errors import CallTimedOut, InvalidRequest, PacelineError, PeerFailed, PeerUnavailable, WrongAnswer
from paceline.security.access import Context
from paceline.types import ProposeRow
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer, DraftServiceStub
from paceline.wire import (
    Exchange,
    Exchanges,
    ServerOptions,
    answered,
    channel,
    open_channel,
    running_server,
    server,
    translated_errors,
)
from paceline.wire import exchange as exchange_module
from paceline.wire.health import Health
from paceline.wire.reopening import ReopeningChannel
from tests.fakes.draft_servers import draft_server
from tests.fakes.proxy import running_proxy, silent_peer
from tests.waits import until

TIMEOUT_S = 60.0


class Servicer(DraftServiceServicer):
    """Answers with the requested sequence's name; some names get no answer. Counts its streams."""

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self.stream_count = self.open_count = self.cancelled_count = 0
        self.callers: set[str] = set()
        self.timeouts_s: list[float] = []
        self.names: list[str] = []
        """Names of the requests, in the order in which they came."""
        self.unasked: asyncio.Queue[pb.ProposeTokensResponse] = asyncio.Queue()
        self.wire_version = 0
        """Version that its answers are in."""
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    async def ProposeTokens(
        self, requests: AsyncIterator[pb.ProposeTokensRequest], context: Context
    ) -> AsyncIterator[pb.ProposeTokensResponse]:
        self.stream_count += 1
        self.open_count += 1
        self.callers.add(context.peer())
        context.add_done_callback(self._ended)  # type: ignore[arg-type]
        async for response in self.exchanges.answers("/a.Service/Method", requests, self._answer, self.unasked):
            yield response

    async def ReleaseDraftSequences(
        self, request: pb.ReleaseDraftSequencesRequest, context: Context
    ) -> pb.ReleaseDraftSequencesResponse:
        self.names += [f"{name} is freed" for name in request.sequence_ids]
        self.entered.set()
        if "held" in request.sequence_ids:
            await self.go_on.wait()
        return pb.ReleaseDraftSequencesResponse()

    async def DescribeDraftModel(
        self, request: pb.DescribeDraftModelRequest, context: Context
    ) -> pb.DescribeDraftModelResponse:
        self.entered.set()
        await self.go_on.wait()
        raise AssertionError

    def _ended(self, _: object) -> None:
        self.open_count -= 1

    async def _answer(self, request: pb.ProposeTokensRequest) -> pb.ProposeTokensResponse:
        name = request.rows[0].sequence_id
        self.timeouts_s.append(request.context.timeout_s)
        if self.wire_version >= RELEASES_ALONG:
            self.names += [f"{one} is freed along" for one in request.context.released_sequence_ids]
        self.names.append(name)
        self.entered.set()
        if name == "refused":
            raise InvalidRequest("no", field="rows")
        if name == "broken":
            raise RuntimeError
        try:
            if name == "held":
                await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise
        results = [pb.ProposeTokensResult(sequence_id=name)]
        return pb.ProposeTokensResponse(results=results, wire_version=self.wire_version)


def serving(
    port: int = 0, grace_s: float = 0, options: ServerOptions | None = None
) -> AbstractAsyncContextManager[tuple[Servicer, str]]:
    servicer = Servicer(Exchanges())  # type: ignore[abstract]
    return draft_server(servicer, port=port, grace_s=grace_s, exchanges=servicer.exchanges, options=options)


@asynccontextmanager
async def exchange_with(address: str) -> AsyncIterator[Exchange]:
    async with open_channel(address) as channel:
        yield Exchange(DraftServiceStub(channel).ProposeTokens)


async def ask(exchange: Exchange, name: str, timeout_s: float = TIMEOUT_S) -> str:
    with translated_errors():
        answer = await exchange.ask(pb.ProposeTokensRequest(rows=[pb.ProposeTokensRow(sequence_id=name)]), timeout_s)
    return str(answer.results[0].sequence_id)


async def test_requests_one_after_another_share_a_stream() -> None:
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        assert [await ask(exchange, str(n)) for n in range(20)] == [str(n) for n in range(20)]
    assert servicer.stream_count == 1


async def test_requests_at_once_have_a_stream_each_and_get_their_own_answers() -> None:
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        for _ in range(3):
            names = [f"sequence {n}" for n in range(5)]
            assert await asyncio.gather(*(ask(exchange, name) for name in names)) == names
    assert servicer.stream_count == 5


@pytest.mark.parametrize(("name", "error"), [("refused", InvalidRequest), ("broken", PeerFailed)])
async def test_a_request_that_fails_says_why_and_the_next_one_is_answered(name: str, error: type[Exception]) -> None:
    async with serving() as (_, address), exchange_with(address) as exchange:
        assert await ask(exchange, "before") == "before"
        with pytest.raises(error):
            await ask(exchange, name)
        assert await ask(exchange, "after") == "after"


async def test_what_is_sent_unasked_is_no_answer() -> None:
    taken: list[pb.ProposeTokensResponse] = []

    async with serving() as (servicer, address), open_channel(address) as channel:
        exchange = Exchange(DraftServiceStub(channel).ProposeTokens, taken.append)
        assert await ask(exchange, "before") == "before"
        for length in range(3):
            servicer.unasked.put_nowait(pb.ProposeTokensResponse(prepared=[pb.PreparedDrafts(length=length)]))
        await until(lambda: len(taken) == 3)  # nobody asks meanwhile
        held = asyncio.create_task(ask(exchange, "held"))
        await servicer.entered.wait()
        servicer.unasked.put_nowait(pb.ProposeTokensResponse(prepared=[pb.PreparedDrafts(length=3)]))
        servicer.go_on.set()
        assert await held == "held"
        await until(lambda: len(taken) == 4)
        assert [one.prepared[0].length for one in taken] == [0, 1, 2, 3]
        servicer.exchanges.end_streams()
        await until(lambda: servicer.open_count == 0)


async def test_requests_given_up_before_their_stream_began_leave_no_task_behind() -> None:
    """gRPC lets a write wait for ever whose stream was cancelled before it began: it stayed, and those behind it."""
    async with silent_peer() as address, exchange_with(address) as exchange:
        before = asyncio.all_tasks()
        asked = [asyncio.create_task(named(exchange, f"{n}", "a")) for n in range(3)]
        for one in asked:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            one.cancel()
        await asyncio.wait(asked)
        await until(lambda: asyncio.all_tasks() == before)


class _AnswersAtTheEnd:
    """A stream whose answer can come in the moment in which its request is given up."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._is_over = False

    async def write(self, request: Any) -> None:
        pass

    async def read(self) -> Any:
        return grpc.aio.EOF if self.answer.done() else await self.answer

    def done(self) -> bool:
        return self._is_over

    def cancel(self) -> None:
        self._is_over = True


async def test_an_answer_in_the_moment_in_which_its_request_is_given_up_was_asked_for() -> None:
    """The log said that the peer was not compatible."""
    stream, ends = _AnswersAtTheEnd(), list[WrongAnswer | None]()
    exchange = Exchange(lambda: stream)
    exchange.tell_ends(ends.append)
    asked = asyncio.create_task(ask(exchange, "one"))
    for _ in range(5):
        await asyncio.sleep(0)
    asked.cancel()
    stream.answer.set_result(pb.ProposeTokensResponse(results=[pb.ProposeTokensResult(sequence_id="one")]))
    await asyncio.wait([asked])
    await until(lambda: bool(ends))
    assert asked.cancelled() and ends == [None]


async def test_that_a_peer_ends_a_stream_is_told_though_nobody_asks() -> None:
    ends: list[WrongAnswer | None] = []
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        exchange.tell_ends(ends.append)
        assert await ask(exchange, "before") == "before"
        assert not ends
        servicer.exchanges.end_streams()
        await until(lambda: ends == [None])


async def named(exchange: Exchange, text: str, *names: str) -> str:
    with translated_errors():
        request = pb.ProposeTokensRequest(rows=[pb.ProposeTokensRow(sequence_id=text)])
        answer = await exchange.ask(request, TIMEOUT_S, names)
    return str(answer.results[0].sequence_id)


async def test_requests_with_a_common_name_come_in_their_order_and_wait_for_no_answer() -> None:
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        asked = [asyncio.create_task(named(exchange, "held", "a"))]
        await servicer.entered.wait()
        asked += [asyncio.create_task(named(exchange, f"{n}", "a", f"{n}")) for n in range(4)]
        other = asyncio.create_task(named(exchange, "other", "b"))
        assert await other == "other"
        assert servicer.names == ["held", "other"]
        servicer.go_on.set()
        assert await asyncio.gather(*asked) == ["held", "0", "1", "2", "3"]
        assert servicer.names == ["held", "other", "0", "1", "2", "3"]
        assert servicer.stream_count == 2


@pytest.mark.parametrize(("name", "error"), [("refused", InvalidRequest), ("broken", PeerFailed)])
async def test_requests_behind_one_that_fails_are_answered_in_their_order(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They failed with it, so a draft service that failed once counted as one that failed twice, and was left."""
    sent, send = list[object](), exchange_module._send

    async def noted_send(stream: Any, request: Any) -> None:
        await send(stream, request)
        sent.append(request)

    monkeypatch.setattr(exchange_module, "_send", noted_send)
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        held = asyncio.create_task(named(exchange, "held", "a"))
        await servicer.entered.wait()
        failing = asyncio.create_task(named(exchange, name, "a"))
        behind = [asyncio.create_task(named(exchange, f"{n}", "a")) for n in range(4)]
        await until(lambda: len(sent) == 6)
        servicer.go_on.set()
        assert await asyncio.gather(held, *behind) == ["held", "0", "1", "2", "3"]
        with pytest.raises(error):
            await failing
        assert servicer.names == ["held", name, "0", "1", "2", "3"]


async def test_a_request_that_follows_two_streams_waits_for_one() -> None:
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        held = asyncio.create_task(named(exchange, "held", "a"))
        await servicer.entered.wait()
        servicer.entered.clear()
        another = asyncio.create_task(named(exchange, "held", "b"))
        await servicer.entered.wait()
        both = asyncio.create_task(named(exchange, "both", "a", "b"))
        servicer.go_on.set()
        assert list(await asyncio.gather(held, another, both)) == ["held", "held", "both"]
        assert servicer.names[-1] == "both"


async def test_a_request_that_is_given_up_takes_no_other_ones_answer() -> None:
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        held = asyncio.create_task(named(exchange, "held", "a"))
        await servicer.entered.wait()
        behind = asyncio.create_task(named(exchange, "behind", "a"))
        last = asyncio.create_task(named(exchange, "last", "a"))
        await asyncio.sleep(0)
        held.cancel()
        behind.cancel()
        await asyncio.wait([held, behind])
        servicer.go_on.set()
        assert await last == "last"
        assert await named(exchange, "after", "a") == "after"


async def test_a_request_that_is_given_up_while_it_is_sent_ends_no_other() -> None:
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        held = asyncio.create_task(named(exchange, "held", "a"))
        await servicer.entered.wait()
        behind = asyncio.create_task(named(exchange, "behind", "a"))
        await asyncio.sleep(0)
        behind.cancel()
        await asyncio.wait([behind])
        servicer.go_on.set()
        assert await held == "held"
        assert await named(exchange, "after", "a") == "after"


async def test_a_request_that_is_given_up_before_it_is_sent_takes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    may_send, send = asyncio.Event(), exchange_module._send

    async def late_send(stream: Any, request: Any) -> None:
        await may_send.wait()
        await send(stream, request)

    monkeypatch.setattr(exchange_module, "_send", late_send)
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        held = asyncio.create_task(named(exchange, "held", "a"))
        behind = asyncio.create_task(named(exchange, "behind", "a"))
        await asyncio.sleep(0)
        behind.cancel()
        await asyncio.wait([behind])
        may_send.set()
        await servicer.entered.wait()
        last = asyncio.create_task(named(exchange, "last", "a"))
        await asyncio.sleep(0)
        servicer.go_on.set()
        assert [await held, await last] == ["held", "last"]
        assert servicer.names == ["held", "last"]


async def test_a_sequence_is_freed_after_a_request_that_was_given_up_behind_another() -> None:
    """It was freed first, and then cached by the request, which nobody waited for, until it had been idle for long."""

    def row(name: str) -> ProposeRow:
        return ProposeRow(name, 0, (1,), 1)

    async with serving() as (servicer, address), open_channel(address) as channel:
        drafter = RemoteDrafter(channel, TIMEOUT_S)
        held = asyncio.create_task(drafter.propose([row("held")]))
        await servicer.entered.wait()
        behind = asyncio.create_task(drafter.propose([row("ended"), row("held")]))
        await asyncio.sleep(0)
        behind.cancel()
        await asyncio.wait([behind])
        drafter.owe(["ended", "other"])
        await drafter.release()
        assert servicer.names == ["held", "other is freed"]
        servicer.go_on.set()
        await asyncio.wait([held])
        await until(lambda: "ended" in servicer.names)
        while drafter.owed_count:
            await asyncio.sleep(0)
            await drafter.release()
        assert servicer.names == ["held", "other is freed", "ended", "ended is freed"]
        await drafter.close()


async def test_a_sequence_that_is_used_again_before_it_was_freed_is_kept() -> None:
    """It was freed while it was in use, and computed once more."""

    def row(name: str) -> ProposeRow:
        return ProposeRow(name, 0, (1,), 1)

    async with serving() as (servicer, address), open_channel(address) as channel:
        servicer.go_on.set()
        drafter = RemoteDrafter(channel, TIMEOUT_S)
        drafter.owe(["moved", "ended"])
        with suppress(PacelineError):  # what answers here answers no rows
            await drafter.propose([row("moved")])
        await drafter.release()
        assert servicer.names == ["moved", "ended is freed"]
        await drafter.close()


@pytest.mark.parametrize(
    ("wire_version", "freed"),
    [(RELEASES_ALONG, ["ended is freed along", "next"]), (RELEASES_ALONG - 1, ["next", "ended is freed"])],
)
async def test_what_is_owed_is_freed_by_the_next_request_or_by_a_call_where_a_service_is_older(
    wire_version: int, freed: list[str]
) -> None:
    async with serving() as (servicer, address), open_channel(address) as channel:
        servicer.wire_version = wire_version
        drafter = RemoteDrafter(channel, TIMEOUT_S)
        drafter.owe(["ended"])
        await drafter.propose([ProposeRow("next", 0, (1,), 1)])
        await drafter.release()
        assert servicer.names == freed
        assert drafter.owed_count == 0
        await drafter.close()


async def test_what_a_failed_request_was_to_free_is_owed_still() -> None:
    async with serving() as (servicer, address), open_channel(address) as channel:
        servicer.wire_version = RELEASES_ALONG
        drafter = RemoteDrafter(channel, TIMEOUT_S)
        drafter.owe(["ended"])
        with pytest.raises(InvalidRequest):
            await drafter.propose([ProposeRow("refused", 0, (1,), 1)])
        assert drafter.owed_count == 1
        await drafter.release()
        assert servicer.names == ["ended is freed along", "refused", "ended is freed"]
        await drafter.close()


@pytest.mark.parametrize("is_along", [True, False])
async def test_what_is_owed_anew_while_it_is_freed_stays_owed(is_along: bool) -> None:
    """It was used in between, and what freed it came before that: its cache stayed until it had been idle for long."""
    async with serving() as (servicer, address), open_channel(address) as channel:
        servicer.wire_version = RELEASES_ALONG
        drafter = RemoteDrafter(channel, TIMEOUT_S)
        drafter.owe(["moved"] if is_along else ["moved", "held"])
        held = [ProposeRow("held", 0, (1,), 1)]
        freeing = asyncio.gather(drafter.propose(held) if is_along else drafter.release())
        await servicer.entered.wait()
        using = asyncio.create_task(drafter.propose([ProposeRow("moved", 0, (1,), 1)]))
        await asyncio.sleep(0)
        drafter.owe(["moved"])
        servicer.go_on.set()
        await freeing
        await using
        assert drafter.owed_count == 1
        await drafter.release()
        assert servicer.names[-2:] == ["moved", "moved is freed"]
        await drafter.close()


async def test_a_request_comes_after_the_one_that_frees_its_sequence() -> None:
    """It was served first, and its sequence was then freed while it was in use, and computed once more."""

    def row(name: str) -> ProposeRow:
        return ProposeRow(name, 0, (1,), 1)

    async with serving() as (servicer, address), open_channel(address) as channel:
        servicer.wire_version = RELEASES_ALONG
        drafter = RemoteDrafter(channel, TIMEOUT_S)
        held = asyncio.create_task(drafter.propose([row("held")]))
        await servicer.entered.wait()
        drafter.owe(["moved"])
        behind = asyncio.create_task(drafter.propose([row("next"), row("held")]))
        await asyncio.sleep(0)
        moved = asyncio.create_task(drafter.propose([row("moved")]))
        await asyncio.sleep(0)
        other = asyncio.create_task(drafter.propose([row("other")]))  # it need not wait, so the one before had time
        await other
        servicer.go_on.set()
        await asyncio.wait([held, behind, moved])
        with pytest.raises(PeerFailed):  # what answers here answers one row
            await behind
        assert servicer.names == ["held", "other", "moved is freed along", "next", "moved"]
        await drafter.close()


async def test_requests_that_are_given_up_at_any_moment_leave_others_their_own_answers() -> None:
    rng = random.Random(4)

    async def a_while() -> None:
        for _ in range(rng.choice((0, 0, 1, 2))):
            await asyncio.sleep(0)

    async with serving() as (_, address), exchange_with(address) as exchange:
        for _ in range(100):
            asked: dict[str, asyncio.Task[str]] = {}
            for text in "01234"[: rng.randrange(2, 6)]:
                asked[text] = asyncio.create_task(named(exchange, text, *rng.sample("abc", rng.randrange(1, 3))))
                await a_while()
            for one in asked.values():
                if rng.random() < 0.4:
                    one.cancel()
                await a_while()
            await asyncio.wait(asked.values())
            kept = {text: one.result() for text, one in asked.items() if not one.cancelled()}
            assert kept == {text: text for text in kept}


async def test_a_request_that_is_given_up_is_given_up_by_the_server_too() -> None:
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        with pytest.raises(CallTimedOut, match=r"no answer came within 2 s"):
            await ask(exchange, "held", timeout_s=2)
        await until(lambda: servicer.cancelled_count == 1)
        servicer.entered.clear()
        task = asyncio.create_task(ask(exchange, "held"))
        await servicer.entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: servicer.cancelled_count == 2)
        assert await ask(exchange, "after") == "after"


async def test_a_peer_that_was_replaced_while_nobody_asked_goes_unnoticed() -> None:
    async with AsyncExitStack() as stack:
        async with serving() as (_, address):
            exchange = await stack.enter_async_context(exchange_with(address))
            await asyncio.gather(*(ask(exchange, "before") for _ in range(3)))
        async with serving(int(address.rpartition(":")[2])) as (servicer, _):
            assert await ask(exchange, "after") == "after"
        assert servicer.stream_count == 1


async def test_a_peer_that_is_gone_is_unavailable() -> None:
    async with AsyncExitStack() as stack:
        async with serving() as (_, address):
            exchange = await stack.enter_async_context(exchange_with(address))
            await ask(exchange, "before")
        with pytest.raises(PeerUnavailable):
            await ask(exchange, "after")


async def test_a_peer_that_is_gone_as_it_is_asked_again_is_unavailable_to_all_who_wait() -> None:
    """gRPC's stub says INTERNAL to all of them then, which was taken for a failure of the peer's."""
    async with (
        serving() as (servicer, address),
        running_proxy(address) as proxy,
        exchange_with(proxy.address) as exchange,
    ):
        for turns in range(30):
            servicer.entered.clear()
            servicer.go_on.clear()
            held = asyncio.create_task(named(exchange, "held", "a"))
            await servicer.entered.wait()
            proxy.cut()
            for _ in range(turns):
                await asyncio.sleep(0)
            behind = asyncio.create_task(named(exchange, "behind", "a"))
            servicer.go_on.set()
            await asyncio.wait([held, behind])
            for one in (held, behind):  # who finds another stream is answered
                assert one.exception() is None or isinstance(one.exception(), PeerUnavailable)


async def test_a_stream_that_is_to_end_is_answered_first() -> None:
    async with serving(grace_s=TIMEOUT_S) as (servicer, address), exchange_with(address) as exchange:
        await asyncio.gather(*(ask(exchange, "before") for _ in range(3)))
        servicer.entered.clear()
        held = asyncio.create_task(ask(exchange, "held"))
        await servicer.entered.wait()
        servicer.exchanges.end_streams()
        await until(lambda: servicer.open_count == 1)
        assert not held.done()
        servicer.go_on.set()
        assert await held == "held"
        await until(lambda: servicer.open_count == 0)


async def test_a_stream_that_begins_while_its_server_closes_has_one_answer() -> None:
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        await ask(exchange, "before")
        servicer.exchanges.close()
        for _ in range(3):
            assert await ask(exchange, "late") == "late"
            await until(lambda: servicer.open_count == 0)
    assert servicer.stream_count == 4


async def test_a_request_carries_what_is_left_of_its_time() -> None:
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        await ask(exchange, "before", timeout_s=500)
        assert 0 < servicer.timeouts_s[0] <= 500
        await ask(exchange, "after", timeout_s=40)
        assert 0 < servicer.timeouts_s[1] <= 40


async def test_a_server_stops_at_once_for_all_the_streams_that_are_kept() -> None:
    async with AsyncExitStack() as stack:
        async with serving(grace_s=10 * TIMEOUT_S) as (_, address):
            exchange = await stack.enter_async_context(exchange_with(address))
            await asyncio.gather(*(ask(exchange, "before") for _ in range(3)))
        with pytest.raises(PeerUnavailable):
            await ask(exchange, "after")


async def test_a_closed_exchange_leaves_no_stream_behind() -> None:
    async with serving() as (servicer, address), exchange_with(address) as exchange:
        await asyncio.gather(*(ask(exchange, "before") for _ in range(3)))
        await exchange.close()
        await until(lambda: servicer.open_count == 0)


async def test_streams_move_to_the_channel_that_replaces_theirs() -> None:
    opened: list[grpc.aio.Channel] = []
    opening: list[object] = [object()]
    async with serving() as (servicer, address):

        def open_one(_: object) -> grpc.aio.Channel:
            opened.append(open_channel(address))
            return opened[-1]

        async with ReopeningChannel(lambda: opening[0], open_one) as channel:
            exchange = Exchange(DraftServiceStub(channel).ProposeTokens)
            await ask(exchange, "before")
            servicer.entered.clear()
            held = asyncio.create_task(ask(exchange, "held"))
            await servicer.entered.wait()
            opening[0] = object()
            channel.get_state()  # any call on it makes it notice
            assert await ask(exchange, "after") == "after"
            servicer.go_on.set()
            assert await held == "held"
            await until(lambda: opened[0].get_state() is grpc.ChannelConnectivity.SHUTDOWN)
            assert opened[1].get_state() is grpc.ChannelConnectivity.READY
            assert await ask(exchange, "later") == "later"


Call = Callable[[grpc.aio.Channel], Awaitable[object]]


async def ask_held(channel: grpc.aio.Channel) -> object:
    return await ask(Exchange(DraftServiceStub(channel).ProposeTokens), "held")


async def describe(channel: grpc.aio.Channel) -> object:
    with translated_errors():
        return answered(await DraftServiceStub(channel).DescribeDraftModel(pb.DescribeDraftModelRequest()))


@pytest.mark.review
@pytest.mark.parametrize("call", [ask_held, describe])
async def test_a_channel_that_is_closed_makes_its_peer_unavailable_and_cancels_nobody(call: Call) -> None:
    """Review C7: gRPC raised UsageError before a call, and during one cancelled a task that nobody cancelled."""
    async with serving() as (servicer, address):
        channel = open_channel(address)
        task = asyncio.create_task(_asking(call, channel))
        await servicer.entered.wait()
        await channel.close()
        with pytest.raises(PeerUnavailable, match="closed while the call was under way"):
            await task
        with pytest.raises(PeerUnavailable, match="Channel is closed"):
            await call(channel)


async def test_a_channel_that_is_closed_before_the_write_has_come_back_is_no_end_by_the_peer() -> None:
    """A server may have the request by then. The error said that the peer had ended the stream."""

    class ClosedWhileWriting:
        async def write(self, _: object) -> None:
            raise asyncio.CancelledError

        async def read(self) -> object:
            return await asyncio.Future()

        def done(self) -> bool:
            return False

        def cancel(self) -> None:
            pass

    with pytest.raises(PeerUnavailable, match="closed while the call was under way"):
        await ask(Exchange(ClosedWhileWriting), "one")


@pytest.mark.review
@pytest.mark.parametrize("call", [ask_held, describe])
async def test_a_task_that_is_cancelled_itself_ends_so(call: Call) -> None:
    async with serving() as (servicer, address), open_channel(address) as channel:
        task = asyncio.create_task(_asking(call, channel))
        await servicer.entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def _asking(call: Call, channel: grpc.aio.Channel) -> object:
    return await call(channel)


async def _garbage(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
    async for _ in requests:
        yield b"\xff"


class _GarbageUnasked:
    """Answers with the requested sequence's name. On its first stream it tells garbage before, once two wait."""

    def __init__(self) -> None:
        self.stream_count = 0

    async def __call__(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        self.stream_count += 1
        if self.stream_count == 1:
            waiting = [await anext(requests), await anext(requests)]
            yield b"\xff"
            for request in waiting:
                yield self._answer(request)
        async for request in requests:
            yield self._answer(request)

    def _answer(self, request: bytes) -> bytes:
        name = pb.ProposeTokensRequest.FromString(request).rows[0].sequence_id
        return pb.ProposeTokensResponse(results=[pb.ProposeTokensResult(sequence_id=name)]).SerializeToString()


async def _garbage_at_once(request: bytes, context: Context) -> bytes:
    return b"\xff"


async def _garbage_as_status(request: bytes, context: Context) -> bytes:
    context.set_trailing_metadata((("grpc-status-details-bin", b"\xff"),))
    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
    raise AssertionError


@asynccontextmanager
async def talking_garbage(describes: Any, proposes: Any = _garbage) -> AsyncIterator[grpc.aio.Channel]:
    handlers: dict[str, Any] = {
        "ProposeTokens": grpc.stream_stream_rpc_method_handler(proposes, bytes),
        "DescribeDraftModel": grpc.unary_unary_rpc_method_handler(describes, bytes),
    }
    handler = grpc.method_handlers_generic_handler("paceline.v1.DraftService", handlers)
    async with (
        running_server(
            "127.0.0.1", 0, [], lambda server: server.add_generic_rpc_handlers((handler,)), grace_s=0
        ) as server,
        open_channel(server.address) as channel,
    ):
        yield channel


@pytest.mark.review
async def test_what_cannot_be_parsed_is_a_failure_of_the_peers() -> None:
    """Review C7: gRPC gives None for it, and reading an attribute of None failed."""
    row = ProposeRow("a", 0, (1,), 1)
    async with talking_garbage(_garbage_at_once) as channel:
        remote = RemoteDrafter(channel, TIMEOUT_S)
        for call in (remote.propose([row]), remote.describe(TIMEOUT_S)):
            with pytest.raises(PeerFailed, match="cannot be parsed"):
                await call
    async with talking_garbage(_garbage_as_status) as channel:
        with pytest.raises(PeerUnavailable, match="gone"):
            await describe(channel)


async def test_after_what_cannot_be_parsed_no_answer_is_taken_for_another_ones() -> None:
    """It may have been told unasked: the answers after it were taken for those of the requests after their own."""
    proposes = _GarbageUnasked()
    async with talking_garbage(_garbage_at_once, proposes.__call__) as channel:
        exchange = Exchange(DraftServiceStub(channel).ProposeTokens)
        requests = [pb.ProposeTokensRequest(rows=[pb.ProposeTokensRow(sequence_id=one)]) for one in ("first", "second")]
        lost, answer = await asyncio.gather(*(exchange.ask(one, TIMEOUT_S, ["same"]) for one in requests))
        assert lost is None
        assert answer.results[0].sequence_id == "second"
        assert proposes.stream_count == 2


class _Unrequested:
    """Answers with the requested sequence's name, and once more with what a test says."""

    def __init__(self, more: bytes) -> None:
        self._more = more
        self.stream_count = 0

    async def __call__(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        self.stream_count += 1
        async for request in requests:
            name = pb.ProposeTokensRequest.FromString(request).rows[0].sequence_id
            results = [pb.ProposeTokensResult(sequence_id=name)]
            yield pb.ProposeTokensResponse(results=results).SerializeToString()
            yield self._more


@pytest.mark.parametrize("more", [b"\xff", pb.ProposeTokensResponse(wire_version=1).SerializeToString()])
async def test_what_nobody_asked_for_ends_its_stream_and_is_told(more: bytes) -> None:
    """It was passed over in silence, and nobody knew of a peer that talks garbage."""
    proposes, ends = _Unrequested(more), list[WrongAnswer | None]()
    async with talking_garbage(_garbage_at_once, proposes.__call__) as channel:
        exchange = Exchange(DraftServiceStub(channel).ProposeTokens)
        exchange.tell_ends(ends.append)
        for count in (1, 2):
            assert await ask(exchange, "one") == "one"
            await until(lambda count=count: len(ends) == count)  # type: ignore[misc]
    assert [type(one) for one in ends] == [WrongAnswer] * 2
    assert proposes.stream_count == 2


@pytest.mark.review
async def test_streams_that_are_not_needed_any_more_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Review A2: streams opened at the busiest moment stayed as long as the coordinator lived."""
    monkeypatch.setattr(exchange_module, "UNUSED_S", 0.1)
    async with serving() as (servicer, address), exchange_with(address) as one:
        await asyncio.gather(*(ask(one, "before") for _ in range(5)))
        while servicer.open_count > 1:
            assert await ask(one, "one at a time") == "one at a time"
        await until(lambda: servicer.open_count == 0)
        assert await ask(one, "after") == "after"


@pytest.mark.review
async def test_a_caller_that_vanished_without_a_word_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Review C15: servers sent no keepalive pings, and held such callers' requests for hours."""
    monkeypatch.setattr(server, "KEEPALIVE_MS", 100)
    monkeypatch.setattr(server, "KEEPALIVE_TIMEOUT_MS", 100)
    async with serving() as (servicer, address), running_proxy(address) as proxy, exchange_with(proxy.address) as one:
        held = asyncio.create_task(ask(one, "held"))
        await servicer.entered.wait()
        proxy.stall()
        await until(lambda: servicer.cancelled_count == 1)
        held.cancel()


async def test_a_watcher_of_the_health_port_that_vanished_is_noticed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The health port's server sent no keepalive pings, and held such watches for hours."""
    monkeypatch.setattr(server, "KEEPALIVE_MS", 100)
    monkeypatch.setattr(server, "KEEPALIVE_TIMEOUT_MS", 100)
    ended = asyncio.Event()

    class Watched(Health):
        async def Watch(
            self, request: health_pb2.HealthCheckRequest, context: Context
        ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
            context.add_done_callback(lambda _: ended.set())  # type: ignore[arg-type]
            async for response in super().Watch(request, context):
                yield response

    monkeypatch.setattr(server, "Health", Watched)
    options = ServerOptions(health_port=0)
    async with running_server("127.0.0.1", 0, [], lambda _: None, grace_s=0, options=options) as running:
        assert running.health_address
        async with running_proxy(running.health_address) as proxy, open_channel(proxy.address) as one:
            stub: Any = health_pb2_grpc.HealthStub(one)
            watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            proxy.stall()
            async with asyncio.timeout(TIMEOUT_S / 2):
                await ended.wait()
            watch.cancel()


def ping_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have callers ping a hundred times as often as they do, with calls or without, and servers allow that."""
    least = {10_000: 1}
    often = {
        "grpc.keepalive_time_ms": 50,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.keepalive_permit_without_calls": 1,
    }
    monkeypatch.setattr(server, "_OPTIONS", [(name, least.get(value, value)) for name, value in server._OPTIONS])
    monkeypatch.setattr(channel, "_OPTIONS", [*(dict(channel._OPTIONS) | often).items()])


async def test_a_request_that_waits_longer_than_many_pings_keeps_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's option had a name that gRPC does not know: a connection without data ended after some minutes."""
    ping_often(monkeypatch)
    async with serving() as (servicer, address), running_proxy(address) as proxy, exchange_with(proxy.address) as one:
        held = asyncio.create_task(ask(one, "held"))
        await servicer.entered.wait()
        sent = proxy.chunk_count
        await until(lambda: held.done() or proxy.chunk_count >= sent + 12)
        servicer.go_on.set()
        assert await held == "held"
        assert (servicer.stream_count, proxy.connection_count) == (1, 1)


async def test_a_caller_may_ping_between_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    ping_often(monkeypatch)
    async with serving() as (_, address), running_proxy(address) as proxy, open_channel(proxy.address) as caller:
        health: Any = health_pb2_grpc.HealthStub(caller)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        sent = proxy.chunk_count
        await until(lambda: caller.get_state() != grpc.ChannelConnectivity.READY or proxy.chunk_count >= sent + 12)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert proxy.connection_count == 1


@pytest.mark.review
async def test_a_connection_that_reached_its_age_takes_no_new_calls_and_breaks_none() -> None:
    """Review C15"""
    old = ServerOptions(max_connection_age_s=0.1)
    async with serving(options=old) as (servicer, address), open_channel(address) as channel:
        exchange = Exchange(DraftServiceStub(channel).ProposeTokens)
        held = asyncio.create_task(ask(exchange, "held"))
        await servicer.entered.wait()
        while len(servicer.callers) < 3:  # connections
            assert await ask(Exchange(DraftServiceStub(channel).ProposeTokens), "another") == "another"
        servicer.go_on.set()
        assert await held == "held"
