"""Reading requests: long requests delay no short one, and the event loop does none of this work."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import grpc
import pytest
from prometheus_client import CollectorRegistry

from coordinator.door import call, servicer
from coordinator.door.admission import Admission
from coordinator.door.admission_threads import LONG_BYTES, AdmissionThreads
from coordinator.door.field_count import MAX_FIELDS
from coordinator.door.record import RequestMetrics
from coordinator.door.tracer import request_tracer
from paceline.errors import InvalidRequest, Overloaded
from paceline.types import GenerationRequest, TokenIds
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from paceline.wire import open_channel, translated_errors
from tests.coordinators import dispatching, fake_cluster, fake_server
from tests.fakes.model_services import Clock, FakeDrafter, FakeVerifier, HeldVerifier

T = TypeVar("T")
LONG = LONG_BYTES + 1
REQUEST = GenerationRequest(TokenIds((9, 9, 9)), 10, ignore_end_tokens=True)


@contextmanager
def threads_of(count: int, max_waiting_bytes: int) -> Iterator[tuple[AdmissionThreads, threading.Event]]:
    """Yield threads and the event that their work waits for."""
    threads, go_on = AdmissionThreads(count, max_waiting_bytes), threading.Event()
    try:
        yield threads, go_on
    finally:
        go_on.set()
        threads.close()


@pytest.mark.review
async def test_long_requests_keep_no_short_one_from_being_admitted() -> None:
    """review C10: as many long texts as threads stopped all admission."""
    with threads_of(1, 10 * LONG) as (threads, go_on):
        long = [asyncio.ensure_future(threads.run(go_on.wait, LONG)) for _ in range(5)]
        assert await threads.run(lambda: "short", 10) == "short"
        go_on.set()
        assert all(await asyncio.gather(*long))


async def test_what_may_wait_is_bounded_by_its_bytes_and_one_alone_is_always_taken() -> None:
    with threads_of(1, LONG + 10) as (threads, go_on):
        first = asyncio.ensure_future(threads.run(go_on.wait, 2 * LONG))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="again later"):
            await threads.run(go_on.wait, LONG)
        go_on.set()
        await first
        assert await threads.run(go_on.wait, LONG)


class Body:
    """Content of a request."""


async def test_what_is_cancelled_is_let_go_before_a_thread_comes_to_it() -> None:
    with threads_of(1, 10 * LONG) as (threads, go_on):
        first = asyncio.ensure_future(threads.run(go_on.wait, LONG))
        body = Body()
        held = weakref.ref(body)
        gone = asyncio.ensure_future(threads.run(partial(id, body), LONG))
        del body
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        del gone
        gc.collect()
        assert held() is None
        go_on.set()
        await first


async def test_a_request_whose_client_goes_while_it_waits_is_not_read_and_makes_room() -> None:
    with threads_of(1, 2 * LONG) as (threads, go_on):
        first = asyncio.ensure_future(threads.run(go_on.wait, LONG))
        read: list[int] = []
        gone = asyncio.ensure_future(threads.run(lambda: read.append(1), LONG))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        last = asyncio.ensure_future(threads.run(go_on.wait, LONG))
        go_on.set()
        assert await first and await last
        assert not read


async def test_a_refusal_brings_nothing_of_the_request_into_the_event_loop() -> None:
    def refuse() -> None:
        prompt = [1] * 1000
        raise InvalidRequest(f"prompt has {len(prompt)} tokens")

    with threads_of(1, LONG) as (threads, _), pytest.raises(InvalidRequest) as refusal:
        await threads.run(refuse, 10)
    frame: Any = refusal.value.__traceback__
    while frame:
        assert "prompt" not in frame.tb_frame.f_locals
        frame = frame.tb_next


@pytest.mark.review
async def test_a_request_is_read_tokenized_and_checked_outside_the_event_loops_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """review C5: a prompt of a million ids held the loop for 18 ms."""
    seen: list[threading.Thread] = []
    for module, name in ((servicer, "parsed"), (servicer, "request_from_pb"), (call, "begin_request")):
        inner = getattr(module, name)

        def noted(*arguments: Any, inner: Any = inner) -> Any:
            seen.append(threading.current_thread())
            return inner(*arguments)

        monkeypatch.setattr(module, name, noted)
    async with fake_cluster(FakeDrafter(1.0), FakeVerifier(), CollectorRegistry()) as client:
        await client.complete(REQUEST)
    assert len(seen) == 3
    assert threading.current_thread() not in seen


@pytest.mark.review
async def test_a_request_that_finds_no_room_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """review C10: the request was tokenized first."""
    admitted: list[GenerationRequest] = []
    admit = Admission.admit

    def counted(self: Admission, request: GenerationRequest) -> Any:
        admitted.append(request)
        return admit(self, request)

    monkeypatch.setattr(Admission, "admit", counted)
    async with fake_cluster(FakeDrafter(1.0), HeldVerifier(0), CollectorRegistry(), queue_limit=1) as client:
        served, waiting = (asyncio.ensure_future(client.complete(REQUEST)) for _ in range(2))
        while len(admitted) < 2 or (await client.describe()).waiting_sequence_count < 1:
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await client.complete(REQUEST)
        assert len(admitted) == 2
        served.cancel()
        waiting.cancel()


async def test_a_request_of_millions_of_parts_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser blocked all threads for 180 ms and made four million objects."""
    parsed: list[bytes] = []
    monkeypatch.setattr(servicer, "parsed", lambda message, _: parsed.append(message))
    async with (
        fake_server(FakeDrafter(0.5), FakeVerifier(), CollectorRegistry()) as server,
        open_channel(server.address) as channel,
    ):
        request = pb.GenerateTextRequest(stop_strings=[""] * (MAX_FIELDS + 1))
        call: Any = GenerationServiceStub(channel).GenerateText(request)
        with pytest.raises(InvalidRequest, match="fields"), translated_errors():
            await call.read()
    assert not parsed


class SlowThreads(AdmissionThreads):
    """Take a while for each request."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(1)
        self._clock, self._seconds = clock, seconds

    async def run(self, admit: Callable[[], T], byte_count: int) -> T:
        self._clock.advance(self._seconds)
        return admit()


async def test_the_time_in_which_a_request_is_read_is_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline was counted from the end of that, so that rounds went on for a caller who had left."""
    clock, registry = Clock(), CollectorRegistry()
    monkeypatch.setattr(call, "time", SimpleNamespace(perf_counter=clock))
    arrived_s = clock()
    async with dispatching([], [HeldVerifier(0)]) as running:
        with request_tracer(None) as tracer:
            parts = running.model, SlowThreads(clock, 3), running.dispatcher, running.drafts
            one = call.Calls(*parts, RequestMetrics(registry), tracer).arrived()
            await one.queue(lambda: REQUEST, 10, timeout_s=10)
            assert one.request.deadline_s == arrived_s + 10
            one.end(grpc.StatusCode.CANCELLED)
