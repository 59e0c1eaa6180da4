"""What the services' metrics say after known work, and how they are served."""

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from coordinator.metrics import RoundMetrics
from coordinator.round import RoundReport, RowReport
from paceline.engine.metrics import ModelCollector, ModelMetrics
from paceline.engine.runner import PassSize
from paceline.errors import AddressInUse, InvalidRequest, PeerFailed, PeerUnavailable
from paceline.metrics import CallCounter, count_tasks, metrics_served, new_registry
from paceline.rpc import Exchange, open_channel, running_server
from paceline.types import CacheDescription, CallTiming, GenerationRequest, HopTime, TokenIds
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1.generation_service_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from paceline.v1.target_service_pb2_grpc import (
    TargetServiceServicer,
    TargetServiceStub,
    add_TargetServiceServicer_to_server,
)
from tests.coordinators import fake_cluster
from tests.fakes import FakeDrafter, FakeVerifier, describe
from tests.prometheus import promtool
from tests.scrapes import by_label, value

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"
TEN_TOKENS = GenerationRequest(TokenIds((9, 9, 9)), 10, ignore_end_tokens=True)
REPORT = RoundReport(
    rows=[RowReport(4, 2, 3), RowReport(0, 0, 1)],
    duration_s=0.020,
    propose=HopTime(0.001, 0.002, 0.003),
    verify=HopTime(0.002, 0.003, 0.007),
    verified_count=7,
    draft_error=None,
    shortage=None,
)


def openmetrics(registry: CollectorRegistry) -> str:
    return str(generate_openmetrics(registry), "utf-8")  # type: ignore[no-untyped-call]


def fetch(url: str, accept: str = "text/plain") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept})) as response:
        return str(response.read(), "utf-8")


async def test_counts_of_a_known_request_are_exact() -> None:
    registry = new_registry("coordinator")
    async with fake_cluster(FakeDrafter(skill=1.0), FakeVerifier(), registry) as client:
        await client.complete(TEN_TOKENS)
        assert value(registry, "rounds_total") == value(registry, "drafts_total") == 2
        assert value(registry, "round_duration_seconds_count") == value(registry, "group_size_sum") == 2
        assert value(registry, "draft_tokens_total") == value(registry, "accepted_tokens_total") == 8
        assert value(registry, "committed_tokens_total") == 10
        per_position = by_label(registry, "accepted_tokens_per_position_total", "position")
        assert per_position == {"0": 2, "1": 2, "2": 2, "3": 2}
        assert value(registry, "group_wait_seconds_count") == 2
        assert value(registry, "draft_available") == 1
        assert value(registry, "sequences_running") == value(registry, "sequences_waiting") == 0
        assert value(registry, "sequences_waiting_limit") == 100


async def test_a_draft_that_is_away_shows() -> None:
    registry = new_registry("coordinator")

    def fail(_: int) -> None:
        assert value(registry, "draft_available") == 1
        assert value(registry, "replicas", service="draft", state="up") == 1
        raise PeerUnavailable("the draft is away")

    async with fake_cluster(FakeDrafter(skill=1.0, before=fail), FakeVerifier(), registry) as client:
        await client.complete(TEN_TOKENS)
        assert value(registry, "draft_failures_total") == 1
        assert value(registry, "drafts_total") == 0
        assert value(registry, "draft_available") == 0
        assert value(registry, "replicas", service="draft", state="down") == 1
        assert value(registry, "replicas", service="target", state="up") == 1


async def test_a_round_that_fails_as_a_whole_is_counted_apart() -> None:
    registry = new_registry("coordinator")

    def fail(_: int) -> None:
        raise PeerFailed("the target is broken")

    async with fake_cluster(FakeDrafter(skill=1.0), FakeVerifier(fail), registry) as client:
        with pytest.raises(PeerFailed):
            await client.complete(TEN_TOKENS)
        assert value(registry, "rounds_failed_total") == 1
        assert value(registry, "round_duration_seconds_count") == 0


def test_the_parts_of_all_hops_make_up_the_round() -> None:
    registry = CollectorRegistry()
    RoundMetrics(registry).round_ended([0.5, 0.25], REPORT)
    parts = {
        (sample.labels["hop"], sample.labels["part"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "paceline_hop_seconds_sum"
    }
    assert parts == {
        ("draft", "wire"): 0.001,
        ("draft", "queue"): 0.002,
        ("draft", "execute"): 0.003,
        ("verify", "wire"): 0.002,
        ("verify", "queue"): 0.003,
        ("verify", "execute"): 0.007,
        ("coordinator", "execute"): pytest.approx(0.002),
    }
    assert sum(parts.values()) == pytest.approx(value(registry, "round_duration_seconds_sum"))
    assert value(registry, "group_wait_seconds_sum") == 0.75
    assert value(registry, "drafts_total") == 1


def test_observations_carry_the_trace_they_were_made_in_where_there_is_one() -> None:
    traced, untraced = CollectorRegistry(), CollectorRegistry()
    RoundMetrics(traced, lambda: {"trace_id": "ab" * 16}).round_ended([0.5], REPORT)
    RoundMetrics(untraced).round_ended([0.5], REPORT)
    linked = [line for line in openmetrics(traced).splitlines() if f'# {{trace_id="{"ab" * 16}"}}' in line]
    assert [line.partition("{")[0] for line in linked] == [
        "paceline_round_duration_seconds_bucket",
        *["paceline_hop_seconds_bucket"] * 7,
    ]
    assert "trace_id" not in openmetrics(untraced)


def test_metrics_are_served_over_http_and_the_port_is_free_again_afterwards() -> None:
    registry = new_registry("draft")
    with metrics_served(registry, "127.0.0.1", 0) as url:
        assert url is not None
        assert 'paceline_start_time_seconds{service="draft"}' in fetch(url)
        assert fetch(url, "application/openmetrics-text").endswith("# EOF\n")
        port = int(url.rpartition(":")[2].partition("/")[0])
        with (
            pytest.raises(AddressInUse, match=f"cannot serve metrics on 127.0.0.1:{port}.*--metrics-port"),
            metrics_served(registry, "127.0.0.1", port),
        ):
            pytest.fail("the port is taken")
    with metrics_served(registry, "127.0.0.1", port) as again:
        assert again == url
    with metrics_served(registry, "127.0.0.1", None) as nothing:
        assert nothing is None


class Obedient(TargetServiceServicer, GenerationServiceServicer):
    """Does what it is told: by the first sequence id of a release, by the text of a prompt."""

    def __init__(self) -> None:
        self.hung = asyncio.Event()

    async def ReleaseTargetSequences(
        self, request: target_pb.ReleaseTargetSequencesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb.ReleaseTargetSequencesResponse:
        await self._obey(request.sequence_ids[0])
        return target_pb.ReleaseTargetSequencesResponse()

    async def VerifyTokens(
        self, requests: AsyncIterator[target_pb.VerifyTokensRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[target_pb.VerifyTokensResponse]:
        async for request in requests:
            await self._obey(request.rows[0].sequence_id)
            yield target_pb.VerifyTokensResponse()

    async def GenerateText(
        self, request: generation_pb.GenerateTextRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generation_pb.GenerateTextResponse]:
        yield generation_pb.GenerateTextResponse()
        await self._obey(request.text)

    async def _obey(self, order: str) -> None:
        if order == "refuse":
            raise InvalidRequest("as told")
        if order == "break":
            raise ValueError("as told")
        if order == "hang":
            self.hung.set()
            await asyncio.Event().wait()


@asynccontextmanager
async def counted_calls(registry: CollectorRegistry) -> AsyncIterator[tuple[Obedient, grpc.aio.Channel]]:
    servicer = Obedient()  # type: ignore[abstract]

    def add(server: grpc.aio.Server) -> None:
        add_TargetServiceServicer_to_server(servicer, server)
        add_GenerationServiceServicer_to_server(servicer, server)

    counter = CallCounter(registry, "target")
    async with (
        running_server("127.0.0.1", 0, [], add, grace_s=1, interceptors=[counter]) as server,
        open_channel(server.address) as channel,
    ):
        yield servicer, channel


async def release(channel: grpc.aio.Channel, order: str, timeout_s: float = 60) -> None:
    request = target_pb.ReleaseTargetSequencesRequest(sequence_ids=[order])
    await TargetServiceStub(channel).ReleaseTargetSequences(request, timeout=timeout_s)


async def drain(channel: grpc.aio.Channel, order: str, timeout_s: float = 60) -> None:
    call = GenerationServiceStub(channel).GenerateText(generation_pb.GenerateTextRequest(text=order), timeout=timeout_s)
    try:
        async for _ in call:
            pass
    finally:
        # Under load a stub whose reader is cancelled was seen not to cancel its call.
        call.cancel()


async def test_requests_on_streams_are_counted_as_calls_and_the_streams_are_not() -> None:
    registry = CollectorRegistry()
    async with counted_calls(registry) as (servicer, channel):
        exchange = Exchange(TargetServiceStub(channel).VerifyTokens)

        async def send(order: str) -> None:
            await exchange.ask(target_pb.VerifyTokensRequest(rows=[target_pb.VerifyTokensRow(sequence_id=order)]), 60)

        for order in ("answer", "answer", "refuse", "answer", "break", "answer"):
            with suppress(grpc.aio.AioRpcError):
                await send(order)
        hanging = asyncio.ensure_future(send("hang"))
        await servicer.hung.wait()
        hanging.cancel()
        while sum((counts := by_label(registry, "rpc_calls_total", "code")).values()) < 7:
            await asyncio.sleep(0.01)
        await send("answer")
    # By now the last stream has been cut off, with nothing in work.
    counts = by_label(registry, "rpc_calls_total", "code")
    assert counts == {"OK": 5, "INVALID_ARGUMENT": 1, "INTERNAL": 1, "CANCELLED": 1}
    assert set(by_label(registry, "rpc_calls_total", "method")) == {"VerifyTokens"}


@pytest.mark.parametrize(("send", "method"), [(release, "ReleaseTargetSequences"), (drain, "GenerateText")])
async def test_calls_are_counted_by_method_and_status(send: Callable[..., Awaitable[None]], method: str) -> None:
    registry = CollectorRegistry()
    async with counted_calls(registry) as (servicer, channel):
        await send(channel, "answer")
        for order in ("refuse", "break"):
            with pytest.raises(grpc.aio.AioRpcError):
                await send(channel, order)
        with pytest.raises(grpc.aio.AioRpcError):
            await send(channel, "hang", 2)
        # On a busy machine the server may begin it only now; what it sets then is not to stand for the next one.
        await servicer.hung.wait()
        servicer.hung.clear()
        hanging = asyncio.ensure_future(send(channel, "hang"))
        await servicer.hung.wait()
        hanging.cancel()
        # The server learns of it in its own time.
        while sum((counts := by_label(registry, "rpc_calls_total", "code")).values()) < 5:
            await asyncio.sleep(0.01)
    assert counts == {"OK": 1, "INVALID_ARGUMENT": 1, "INTERNAL": 1, "DEADLINE_EXCEEDED": 1, "CANCELLED": 1}
    assert set(by_label(registry, "rpc_calls_total", "method")) == {method}


async def test_tasks_are_counted_from_any_thread() -> None:
    registry = CollectorRegistry()
    count_tasks(registry, "target")
    before = await asyncio.to_thread(value, registry, "tasks", service="target")
    waiting = asyncio.create_task(asyncio.Event().wait())
    assert await asyncio.to_thread(value, registry, "tasks", service="target") == before + 1
    waiting.cancel()


def model_registry() -> tuple[CollectorRegistry, ModelMetrics]:
    registry = new_registry("target")
    cache = CacheDescription(
        layout="dense",
        capacity_bytes=1000,
        used_bytes=600,
        idle_bytes=40,
        sequence_count=3,
        shared_token_count=7,
        realigned_bytes=50,
        realignment_s=1.5,
    )
    registry.register(ModelCollector("target", lambda: replace(describe("tiny"), cache=cache)))
    return registry, ModelMetrics(registry, "target")


def test_a_model_service_tells_of_its_calls_passes_and_cache() -> None:
    registry, metrics = model_registry()
    metrics.call_ended(CallTiming(0.5, 0.25))
    metrics.pass_ended(PassSize(row_count=3, token_count=40, prompt_token_count=30))
    metrics.pass_ended(PassSize(row_count=2, token_count=12, prompt_token_count=0))
    for name, expected in {
        "call_queue_seconds_sum": 0.5,
        "call_execute_seconds_sum": 0.25,
        "pass_rows_sum": 5,
        "pass_rows_count": 2,
        "pass_tokens_sum": 52,
        "prefill_tokens_total": 30,
        "kv_capacity_bytes": 1000,
        "kv_used_bytes": 600,
        "kv_idle_bytes": 40,
        "kv_sequences": 3,
        "prefix_shared_tokens_total": 7,
        "realigned_bytes_total": 50,
        "realignment_seconds_total": 1.5,
    }.items():
        assert value(registry, name, service="target") == expected
    assert by_label(registry, "model_info", "model") == {"tiny": 1}


async def all_registries() -> list[CollectorRegistry]:
    """A coordinator's and a model service's, after something of every kind was counted."""
    coordinator, (model, _) = new_registry("coordinator"), model_registry()
    for registry, service in ((coordinator, "coordinator"), (model, "target")):
        count_tasks(registry, service)
    async with fake_cluster(FakeDrafter(skill=1.0), FakeVerifier(), coordinator) as client:
        await client.complete(TEN_TOKENS)
    async with counted_calls(model) as (_, channel):
        await release(channel, "answer")
    return [coordinator, model]


async def test_the_document_names_every_metric_with_its_type_and_labels() -> None:
    exposed = {
        (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            ", ".join(sorted({label for sample in family.samples for label in sample.labels} - {"le"})),
        )
        for registry in await all_registries()
        for family in registry.collect()
        if family.name.startswith("paceline_")
    }
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert {(name, kind, ", ".join(sorted(re.findall(r"\w+", labels)))) for name, kind, labels in rows} == exposed


async def test_names_and_types_pass_promtools_lint() -> None:
    for registry in await all_registries():
        assert await promtool("check", "metrics", stdin=generate_latest(registry)) == (0, "")
