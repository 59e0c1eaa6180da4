"""The record of a request at its end, however it ends: one log line, and its times."""

import asyncio
import gc
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from structlog.testing import capture_logs

from coordinator.door import servicer
from coordinator.door.admission import Admission
from coordinator.door.record import RequestMetrics, RequestRecord
from coordinator.requests.generation import Request
from paceline.client import NO_RETRIES, Client
from paceline.codec.generation import accepted_to_pb, request_to_pb
from paceline.errors import CallTimedOut, InvalidRequest, NoChoice, Overloaded, PacelineError, PeerFailed
from paceline.observe.logs import active_span
from paceline.observe.metrics import new_registry
from paceline.types import (
    FinishReason,
    GenerationAccepted,
    GenerationFinish,
    GenerationRequest,
    OutputPiece,
    OutputToken,
    TokenIds,
    Usage,
    VerifyRow,
)
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from paceline.wire import open_channel
from tests.coordinators import fake_cluster, fake_server
from tests.fakes.model_services import Clock, FakeDrafter, FakeVerifier, HeldVerifier
from tests.generations import generation_of
from tests.scrapes import REFERENCE, by_label, value
from tests.waits import until

PROMPT = TokenIds((9, 9, 9))
TEN_TOKENS = GenerationRequest(PROMPT, 10, ignore_end_tokens=True)
ENDLESS = GenerationRequest(PROMPT, 900, ignore_end_tokens=True)


def lines(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["event"] == "request ended"]


async def line_of(logs: list[Any]) -> Any:
    """Wait for the request's one log line, which the coordinator writes when it learns of the end."""
    await until(lambda: lines(logs))
    (line,) = lines(logs)
    return line


@asynccontextmanager
async def serving(
    verifier: FakeVerifier, *, queue_limit: int = 100
) -> AsyncIterator[tuple[Client, CollectorRegistry, list[Any]]]:
    """Yield a client of a coordinator, its registry and its log lines."""
    registry = new_registry("coordinator")
    with capture_logs() as logs:
        async with fake_cluster(FakeDrafter(1.0), verifier, registry, queue_limit=queue_limit) as client:
            yield client, registry, logs


async def test_a_finished_request_has_one_line_with_all_its_counts() -> None:
    async with serving(FakeVerifier()) as (client, registry, logs):
        await client.complete(TEN_TOKENS)
        line = await line_of(logs)
        assert 0 <= line["queued_s"] <= line["time_to_first_token_s"] <= line["duration_s"]
        times = ("queued_s", "time_to_first_token_s", "duration_s", "request_id")
        assert {name: told for name, told in line.items() if name not in times} == {
            "event": "request ended",
            "log_level": "info",
            "code": "OK",
            "finish_reasons": ["length"],
            "prompt_tokens": 3,
            "output_tokens": 10,
            "rounds": 2,
            "drafted": 8,
            "accepted": 8,
            "sources": {"draft draft": {"drafted": 8, "accepted": 8}},
        }
        assert by_label(registry, "requests_total", "code") == {"OK": 1}
        assert by_label(registry, "completions_total", "finish_reason") == {"length": 1}
        assert value(registry, "prompt_tokens_total") == 3
        for histogram in (
            *("request_queue_seconds", "request_duration_seconds"),
            *("time_to_first_token_seconds", "time_per_output_token_seconds"),
        ):
            assert value(registry, f"{histogram}_count") == 1


async def test_a_request_for_several_outputs_has_one_line_for_all() -> None:
    request = replace(TEN_TOKENS, completion_count=3)
    async with serving(FakeVerifier()) as (client, registry, logs):
        await client.complete_all(request)
        line = await line_of(logs)
        assert (line["output_tokens"], line["finish_reasons"]) == (30, ["length"] * 3)
        assert by_label(registry, "completions_total", "finish_reason") == {"length": 3}
        assert value(registry, "prompt_tokens_total") == 3
        assert value(registry, "time_to_first_token_seconds_count") == 1
        assert value(registry, "time_per_output_token_seconds_count") == 3


@pytest.mark.review
async def test_the_first_message_says_before_any_token_what_a_client_needs_to_continue() -> None:
    """Review G7: the seed of a stream came only with its finish."""
    registry = new_registry("coordinator")
    with capture_logs() as logs:
        async with (
            fake_server(FakeDrafter(1.0), HeldVerifier(0), registry) as server,
            open_channel(server.address) as channel,
        ):
            call = GenerationServiceStub(channel).GenerateText(request_to_pb(TEN_TOKENS))
            first = await anext(aiter(call))
            call.cancel()
            line = await line_of(logs)
    told = first.accepted
    assert told.prompt_time_s
    assert first == accepted_to_pb(
        GenerationAccepted(line["request_id"], told.seed, 3, "", "target", told.prompt_time_s, 10)
    )
    assert first.accepted.seed


async def test_a_refused_request_keeps_nothing_of_its_message_until_the_garbage_collector_comes() -> None:
    message = request_to_pb(replace(TEN_TOKENS, max_new_tokens=-1)).SerializeToString()
    gc.disable()
    try:
        async with (
            fake_server(FakeDrafter(1.0), FakeVerifier(), new_registry("coordinator")) as server,
            open_channel(server.address) as channel,
        ):
            call: Any = channel.unary_stream("/paceline.v1.GenerationService/GenerateText")
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(aiter(call(message)))
        frames: list[Any] = [one for one in gc.get_objects() if type(one) is FrameType]
        assert not [one for one in frames if one.f_locals.get("request") == message]
    finally:
        gc.enable()


async def test_a_request_that_was_read_keeps_nothing_of_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred that waited, each of the 8 MiB that a message may have, took a gigabyte."""
    read: list[bytes] = []
    monkeypatch.setattr(servicer, "check_field_count", lambda message, _: read.append(message))
    message = request_to_pb(ENDLESS).SerializeToString() + unknown_field(1 << 16)
    async with (
        fake_server(FakeDrafter(1.0), HeldVerifier(0), new_registry("coordinator")) as server,
        open_channel(server.address) as channel,
    ):
        ask: Any = channel.unary_stream("/paceline.v1.GenerationService/GenerateText")
        call = ask(message)
        await anext(aiter(call))
        holder_count = sys.getrefcount(read[0])
        assert (read, holder_count) == ([message], 2)  # the list, and the argument
        call.cancel()


def unknown_field(byte_count: int) -> bytes:
    """Return a part of a message with so many bytes that no version knows."""
    content = pb.GenerateTextRequest(text="x" * byte_count).SerializeToString()
    return b"\xc2\x3e" + content[1:]  # number 1000, in the place of the text's


async def test_a_refused_request_says_which_field_was_wrong() -> None:
    async with serving(FakeVerifier()) as (client, registry, logs):
        with pytest.raises(InvalidRequest):
            await client.complete(replace(TEN_TOKENS, max_new_tokens=-1))
        line = await line_of(logs)
        assert (line["code"], line["reason"], line["field"]) == (
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            "max_new_tokens",
        )
        assert (line["output_tokens"], line["queued_s"], line["time_to_first_token_s"]) == (0, None, None)
        assert by_label(registry, "requests_rejected_total", "reason") == {"INVALID_REQUEST": 1}
        assert by_label(registry, "requests_total", "code") == {"INVALID_ARGUMENT": 1}
        assert value(registry, "request_queue_seconds_count") == 0


async def test_a_request_that_finds_the_queue_full_is_rejected_for_it() -> None:
    async with serving(HeldVerifier(0), queue_limit=1) as (client, registry, logs):
        held = [asyncio.ensure_future(client.complete(ENDLESS)) for _ in range(2)]
        await until(lambda: value(registry, "sequences_running") + value(registry, "sequences_waiting") == 2)
        with pytest.raises(Overloaded):
            await client.complete(TEN_TOKENS)
        line = await line_of(logs)
        assert (line["code"], line["reason"], line["log_level"]) == ("RESOURCE_EXHAUSTED", "OVERLOADED", "info")
        assert by_label(registry, "requests_rejected_total", "reason") == {"OVERLOADED": 1}
        for one in held:
            one.cancel()
        await until(lambda: len(lines(logs)) == 3)
        # One of them was never in a round: it spent all its time in the queue.
        assert by_label(registry, "requests_total", "code") == {"RESOURCE_EXHAUSTED": 1, "CANCELLED": 2}
        assert value(registry, "request_queue_seconds_count") == 2


async def test_a_failed_request_warns_and_tells_no_message() -> None:
    def fail(_: int) -> None:
        raise PeerFailed("target at 10.0.0.7 with token s3cret is broken")

    async with serving(FakeVerifier(fail)) as (client, registry, logs):
        with pytest.raises(PeerFailed):
            await client.complete(TEN_TOKENS)
        line = await line_of(logs)
        assert (line["code"], line["reason"], line["log_level"]) == ("INTERNAL", "PEER_FAILED", "warning")
        assert "s3cret" not in str(line)
        assert by_label(registry, "requests_rejected_total", "reason") == {}


@pytest.mark.parametrize("shares_stream", [False, True])
async def test_a_failure_that_nobody_expected_names_the_request_too(
    shares_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller was sent to the log without what to look for there."""

    def fail(*_: object) -> None:
        raise RuntimeError("s3cret")

    monkeypatch.setattr(Admission, "admit", fail)
    with capture_logs() as logs:
        async with (
            fake_server(FakeDrafter(1.0), FakeVerifier(), new_registry("coordinator")) as server,
            Client(server.address, NO_RETRIES, shares_stream=shares_stream) as client,
        ):
            with pytest.raises(PeerFailed, match="its log has the details") as failed:
                await anext(client.generate(TEN_TOKENS))
            line = await line_of(logs)
    assert failed.value.metadata == {"request_id": line["request_id"]}
    assert "s3cret" not in failed.value.message
    assert [one["event"] for one in logs if one["log_level"] == "error"] == ["unexpected error in a call"]


async def test_a_cancelled_request_tells_how_far_it_came() -> None:
    async with serving(HeldVerifier(1)) as (client, registry, logs):
        stream = client.generate(ENDLESS)
        await anext(stream)
        await stream.aclose()
        line = await line_of(logs)
        assert (line["code"], line["output_tokens"], line["rounds"]) == ("CANCELLED", 5, 1)
        assert line["time_to_first_token_s"] is not None
        assert by_label(registry, "requests_total", "code") == {"CANCELLED": 1}
        assert value(registry, "request_duration_seconds_count") == 0


async def test_a_request_past_its_deadline_is_told_from_a_cancelled_one() -> None:
    async with serving(HeldVerifier(1)) as (client, registry, logs):
        with pytest.raises(CallTimedOut):
            await client.complete(ENDLESS, timeout_s=2)
        assert (await line_of(logs))["code"] == "DEADLINE_EXCEEDED"
        assert by_label(registry, "requests_total", "code") == {"DEADLINE_EXCEEDED": 1}


def piece(count: int, finish: GenerationFinish | None = None) -> OutputPiece:
    return OutputPiece((OutputToken(5, "", accepted=False),) * count, finish)


def recorded(registry: CollectorRegistry) -> None:
    """Record 7 s: 0.5 s queued, the first 3 of 11 tokens after 2 s, the last after 6 s."""
    clock = Clock()
    record = RequestRecord(RequestMetrics(registry), clock)
    request = Request(submitted_s=100.0)
    request.generations = [generation_of(request=request, first_grouped_s=100.5)]
    record.queue(request)
    clock.advance(2)
    record.deliver(piece(3))
    clock.advance(4)
    record.deliver(piece(8, GenerationFinish(FinishReason.LENGTH, Usage(3, 11))))
    clock.advance(1)
    record.end(grpc.StatusCode.OK)


def test_times_of_a_request_are_vllms() -> None:
    registry = CollectorRegistry()
    with capture_logs() as logs:
        recorded(registry)
    assert value(registry, "time_to_first_token_seconds_sum") == 2
    assert value(registry, "time_per_output_token_seconds_sum") == 4 / 10
    assert value(registry, "request_duration_seconds_sum") == 7
    assert value(registry, "request_queue_seconds_sum") == 0.5
    assert (logs[0]["queued_s"], logs[0]["time_to_first_token_s"], logs[0]["duration_s"]) == (0.5, 2, 7)


def test_every_reason_of_the_reference_is_there_before_a_request_is_refused() -> None:
    """That of another model appeared with its first request, which no rate shows."""
    registry = CollectorRegistry()
    RequestMetrics(registry)
    (row,) = (
        one for one in REFERENCE.read_text(encoding="utf-8").splitlines() if "`paceline_requests_rejected_total`" in one
    )
    reasons = set(re.findall(r"`([A-Z_]+)`", row))
    assert {value(registry, "requests_rejected_total", reason=one) for one in reasons} == {0}


def test_a_request_that_no_round_took_was_queued_since_it_was_read() -> None:
    """The time in which it was read and tokenized counted as time in the queue."""
    clock, registry = Clock(), CollectorRegistry()
    record = RequestRecord(RequestMetrics(registry), clock)
    clock.advance(3)
    request = Request()
    request.generations = [generation_of(request=request)]
    record.queue(request)
    clock.advance(2)
    with capture_logs() as logs:
        record.end(grpc.StatusCode.CANCELLED)
    assert (logs[0]["queued_s"], logs[0]["duration_s"]) == (2, 5)
    assert value(registry, "request_queue_seconds_sum") == 2


@pytest.mark.parametrize(("received_counts", "queued_s"), [((3, 2), 0.5), ((3, 3), None)])
def test_an_output_that_was_received_whole_waits_for_no_round(
    received_counts: tuple[int, ...], queued_s: float | None
) -> None:
    """It counted as waiting until the request ended, so that a long output made a long queue."""
    clock, registry = Clock(), CollectorRegistry()
    record, request = RequestRecord(RequestMetrics(registry), clock), Request(submitted_s=100.0)
    for index, count in enumerate(received_counts):
        one = generation_of(max_new_tokens=3, name=str(index), request=request, completion_index=index)
        one.resume([5] * count)
        one.first_grouped_s = None if one.output.finish_reason else 100.5
        request.generations.append(one)
    record.queue(request)
    clock.advance(60)
    with capture_logs() as logs:
        record.end(grpc.StatusCode.OK)
    assert logs[0]["queued_s"] == queued_s
    assert value(registry, "request_queue_seconds_sum") == (queued_s or 0)
    assert value(registry, "request_queue_seconds_count") == (queued_s is not None)


def test_the_line_and_the_metrics_of_a_traced_request_name_its_span() -> None:
    registry = CollectorRegistry()
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("request"), capture_logs() as logs:
        span = active_span()
        recorded(registry)
    assert span is not None
    assert (logs[0]["trace_id"], logs[0]["span_id"]) == (span.trace_id, span.span_id)
    exposed = str(generate_latest(registry), "utf-8")  # type: ignore[no-untyped-call]
    assert exposed.count(f'# {{trace_id="{span.trace_id}"}}') == 4


def test_a_request_in_a_span_that_is_not_sampled_names_none() -> None:
    tracer = TracerProvider(ALWAYS_OFF).get_tracer("test")
    with tracer.start_as_current_span("request"), capture_logs() as logs:
        recorded(CollectorRegistry())
    assert "trace_id" not in logs[0]


class Naming(FakeVerifier):
    """Fails every row and names its sequence in the error."""

    def _verify(self, row: VerifyRow) -> PacelineError:
        name = row.sequence_id
        self.named = name
        return NoChoice(f"sequence {name!r} has no choice", {"sequence_id": name, "position": "3"})


@pytest.mark.review
async def test_an_error_of_a_model_services_names_the_request_and_no_sequence() -> None:
    """Review C15"""
    verifier = Naming()
    async with fake_cluster(FakeDrafter(skill=1.0), verifier, CollectorRegistry()) as client:
        with pytest.raises(NoChoice, match="sequence '[0-9a-f]{16}' has no choice") as failed:
            await client.complete(GenerationRequest(TokenIds((5, 6)), 4))
    assert verifier.named not in f"{failed.value.message} {failed.value.metadata}"
    request_id = failed.value.metadata["request_id"]
    assert failed.value.metadata == {"position": "3", "request_id": request_id}
    assert request_id in failed.value.message


@pytest.mark.parametrize("shares_stream", [False, True])
@pytest.mark.parametrize("given", ["the-callers.own", "not one", "x" * 129, ""])
async def test_a_request_has_the_id_that_its_caller_gives_and_an_error_tells_it(
    given: str, shares_stream: bool
) -> None:
    with capture_logs() as logs:
        async with (
            fake_server(FakeDrafter(1.0), FakeVerifier(), CollectorRegistry()) as server,
            Client(server.address, NO_RETRIES, shares_stream=shares_stream) as client,
        ):
            told: list[GenerationAccepted] = []
            headers = {"x-request-id": given}
            async for _ in client.generate(TEN_TOKENS, on_accepted=told.append, headers=headers):
                pass
            with pytest.raises(InvalidRequest) as refused:
                async for _ in client.generate(replace(TEN_TOKENS, max_new_tokens=0), headers=headers):
                    pass
            while len(lines(logs)) < 2:
                await asyncio.sleep(0.01)
    named = [told[0].request_id, refused.value.metadata["request_id"]]
    assert [one["request_id"] for one in lines(logs)] == named
    assert named == [given] * 2 if given == "the-callers.own" else all(len(one) == 16 for one in named)
