"""The services' metrics after known work, and how they are served."""

import asyncio
import re
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from coordinator.rounds.metrics import RoundMetrics
from coordinator.rounds.round import RoundReport, RowReport
from coordinator.rounds.statistics import Statistics
from paceline.engine.runner import PassSize
from paceline.errors import AddressInUse, PeerFailed, PeerUnavailable
from paceline.model_service.metrics import ModelCollector, ModelMetrics
from paceline.observe.metrics import count_tasks, metrics_served, new_registry
from paceline.types import CacheDescription, CallTiming, ClusterStatistics, GenerationRequest, HopTime, TokenIds
from tests.coordinators import fake_cluster
from tests.fakes.counted_calls import counted_calls, release
from tests.fakes.model_services import FakeDrafter, FakeVerifier, describe
from tests.prometheus import promtool
from tests.scrapes import by_label, value

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
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
            pytest.raises(AddressInUse, match=f"cannot listen on 127.0.0.1:{port}.*--metrics-port"),
            metrics_served(registry, "127.0.0.1", port),
        ):
            pytest.fail("the port is taken")
    with metrics_served(registry, "127.0.0.1", port) as again:
        assert again == url
    with metrics_served(registry, "127.0.0.1", None) as nothing:
        assert nothing is None


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
    """Return a coordinator's and a model service's registry, after something of every kind was counted."""
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


@pytest.mark.review
async def test_what_the_loop_changes_is_read_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Review C15: a scrape's thread iterated over dictionaries that the loop may change meanwhile."""
    registry, readers, snapshot = CollectorRegistry(), set[int](), Statistics.snapshot

    def read(statistics: Statistics) -> ClusterStatistics:
        readers.add(threading.get_ident())
        return snapshot(statistics)

    monkeypatch.setattr(Statistics, "snapshot", read)
    async with fake_cluster(FakeDrafter(skill=1.0), FakeVerifier(), registry):
        scraped = await asyncio.to_thread(generate_latest, registry)
    assert b"paceline_replicas" in scraped
    assert readers == {threading.get_ident()}
