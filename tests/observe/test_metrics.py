"""The services' metrics after known work, and how they are served."""

import asyncio
import threading
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from coordinator.rounds.metrics import RoundMetrics
from coordinator.rounds.round_report import RoundReport, RowReport
from coordinator.rounds.statistics import Statistics
from coordinator.serving import running_coordinator
from paceline import __version__
from paceline.checks import MAX_ROWS
from paceline.codec.versions import VERSION
from paceline.engine.runner import PassSize
from paceline.errors import AddressInUse, PeerFailed, PeerUnavailable
from paceline.gateway.config import GatewaySettings
from paceline.model_service.metrics import ModelCollector, ModelMetrics
from paceline.observe.metrics import (
    REQUEST_BUCKETS_S,
    ROUND_BUCKETS_S,
    ROW_BUCKETS,
    CertificateCollector,
    count_tasks,
    metrics_served,
    new_registry,
)
from paceline.process.instruments import Instruments, instruments
from paceline.process.service_process import announced_endpoint
from paceline.security.certificates import end_times_s, watch_certificates
from paceline.types import (
    CacheDescription,
    CallTiming,
    ClusterStatistics,
    DraftingOptions,
    DraftSource,
    GenerationRequest,
    HopTime,
    SourceUsage,
    TokenIds,
)
from tests.certificates import Authority
from tests.coordinators import fake_cluster, settings_of
from tests.fakes.counted_calls import counted_calls, release
from tests.fakes.model_services import FakeDrafter, FakeVerifier, describe
from tests.fakes.scripted_generator import ScriptedGenerator, pieces, scripted_door
from tests.ports import port_for_later
from tests.prometheus import promtool
from tests.scrapes import by_label, documented_metrics, value

TEN_TOKENS = GenerationRequest(TokenIds((9, 9, 9)), 10, ignore_end_tokens=True)
REPORT = RoundReport(
    rows=[RowReport(4, 2, 3), RowReport(0, 0, 1)],
    duration_s=0.020,
    propose=HopTime(0.001, 0.002, 0.003),
    verify=HopTime(0.002, 0.003, 0.007),
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
        for name in ("source_draft_tokens_total", "source_accepted_tokens_total"):
            assert by_label(registry, name, "source") == {"draft": 8}
            assert value(registry, name, source="suffix", draft_model="") == 0
        assert value(registry, "group_wait_seconds_count") == 2
        assert value(registry, "draft_available") == 1
        assert value(registry, "sequences_running") == value(registry, "sequences_waiting") == 0
        assert value(registry, "sequences_waiting_limit") == 100


async def test_where_there_is_to_be_no_draft_service_nothing_says_that_it_is_missing() -> None:
    registry = new_registry("coordinator")
    async with fake_cluster(FakeDrafter(1.0), FakeVerifier(), registry, draft="none"):
        assert registry.get_sample_value("paceline_draft_available") is None


def test_rows_count_for_the_source_and_the_model_that_drafted() -> None:
    statistics = Statistics()
    draft, suffix = DraftSource.DRAFT, DraftSource.SUFFIX
    rows = [
        *(RowReport(4, 2, 3, draft, "small"), RowReport(4, 4, 5, draft, "large"), RowReport(4, 1, 2, draft, "small")),
        *(RowReport(3, 0, 1, suffix), RowReport(0, 0, 1)),
    ]
    for _ in range(2):
        statistics.count_report(replace(REPORT, rows=rows))
    counted = statistics.snapshot()
    assert counted.sources == (
        *(SourceUsage(draft, "small", 16, 6), SourceUsage(draft, "large", 8, 8)),
        SourceUsage(suffix, "", 6, 0),
    )
    assert sum(one.drafted_count for one in counted.sources) == counted.drafted_count


async def test_a_draft_that_is_away_shows() -> None:
    registry = new_registry("coordinator")

    def fail(_: int) -> None:
        assert value(registry, "draft_available") == 1
        assert value(registry, "replicas", component="draft", state="up") == 1
        raise PeerUnavailable("the draft is away")

    async with fake_cluster(FakeDrafter(skill=1.0, before=fail), FakeVerifier(), registry) as client:
        await client.complete(replace(TEN_TOKENS, drafting=DraftingOptions((DraftSource.DRAFT,))))
        assert value(registry, "draft_failures_total") == 1
        assert value(registry, "drafts_total") == 0
        assert value(registry, "draft_available") == 0
        assert value(registry, "replicas", component="draft", state="down") == 1
        assert value(registry, "replicas", component="target", state="up") == 1


async def test_a_draft_whose_calls_fail_is_not_available_until_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its circuit's pause was over it was told to be, until the next request tried it."""
    monkeypatch.setattr("coordinator.replicas.circuit.FIRST_PAUSE_S", 0.0)
    registry, errors = new_registry("coordinator"), [PeerFailed("broken")] * 2

    def fail(_: int) -> None:
        if errors:
            raise errors.pop()

    drafter, asked = FakeDrafter(skill=1.0, before=fail), DraftingOptions((DraftSource.DRAFT,))
    async with fake_cluster(drafter, FakeVerifier(), registry) as client:
        await client.complete(replace(TEN_TOKENS, max_new_tokens=3, drafting=asked))
        assert not errors
        assert value(registry, "replicas", component="draft", state="open") == 1
        assert value(registry, "draft_available") == 0
        await client.complete(replace(TEN_TOKENS, drafting=asked))
        assert value(registry, "replicas", component="draft", state="up") == 1
        assert value(registry, "draft_available") == 1


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


def test_buckets_tell_apart_what_rounds_and_requests_take() -> None:
    """Answers of ten minutes counted as 100 s, and a round of 0.3 s as anything up to 0.5."""
    rounds_s = [bound for bound in ROUND_BUCKETS_S if 0.001 <= bound <= 1.0]
    assert all(after <= 1.51 * before for before, after in pairwise(rounds_s))
    answer_s = GatewaySettings.model_fields["request_timeout_s"].default
    assert answer_s in REQUEST_BUCKETS_S and REQUEST_BUCKETS_S[-1] > answer_s
    assert all(after <= 2.5 * before for before, after in pairwise(REQUEST_BUCKETS_S))
    assert ROW_BUCKETS[-1] >= MAX_ROWS


def test_metrics_are_served_over_http_and_the_port_is_free_again_afterwards() -> None:
    registry = new_registry("draft")
    with metrics_served(registry, "127.0.0.1", 0) as url:
        assert url is not None
        assert 'paceline_start_time_seconds{component="draft"}' in fetch(url)
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


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_metrics_are_served_at_an_address_of_ipv6_however_it_is_written(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With brackets, as `--host` takes it, it was refused; without them the URL was none."""
    served = Mock(server_port=7)
    start = Mock(return_value=(served, Mock()))
    monkeypatch.setattr("paceline.observe.metrics.start_http_server", start)
    registry = new_registry("draft")
    with metrics_served(registry, host, 0) as url:
        start.assert_called_once_with(0, "::1", registry)
        assert url == "http://[::1]:7/metrics"
        assert announced_endpoint(f"draft_service listening on [::1]:5, metrics on {url}").metrics_url == url
    served.server_close.assert_called_once()


async def test_tasks_are_counted_from_any_thread() -> None:
    registry = CollectorRegistry()
    count_tasks(registry, "target")
    before = await asyncio.to_thread(value, registry, "tasks", component="target")
    waiting = asyncio.create_task(asyncio.Event().wait())
    assert await asyncio.to_thread(value, registry, "tasks", component="target") == before + 1
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
        "realigned_bytes_total": 50,
        "realignment_seconds_total": 1.5,
    }.items():
        assert value(registry, name, component="target") == expected
    assert value(registry, "prompt_cached_tokens_total", component="target", model="tiny") == 7
    assert by_label(registry, "model_info", "model") == {"tiny": 1}


@asynccontextmanager
async def waiting_coordinator(**asked: Any) -> AsyncIterator[Instruments]:
    """Run a coordinator whose target never comes; yield its instruments, served over HTTP."""
    nobody = f"127.0.0.1:{port_for_later()}"
    settings = settings_of(draft=nobody, target=nobody, metrics_port=0, startup_timeout_s=3600, **asked)

    async def serve(watched: Instruments) -> None:
        async with running_coordinator(settings, watched):
            pytest.fail("there is no target")

    with instruments("coordinator", settings) as watched:
        serving = asyncio.create_task(serve(watched))
        try:
            yield watched
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


async def scraped(watched: Instruments, expected: str) -> str:
    """Scrape until the answer holds `expected`, and return the answer."""
    assert watched.metrics_url
    while expected not in (answer := await asyncio.to_thread(fetch, watched.metrics_url)):
        await asyncio.sleep(0.01)
    return answer


@pytest.mark.review
async def test_a_coordinator_that_never_finds_a_target_tells_so_while_it_waits() -> None:
    """Review D8: it exported no `paceline_replicas`, so the alerts stayed silent in exactly that case."""
    async with waiting_coordinator() as watched:
        # The replica that the settings name is known, and is not up.
        answer = await scraped(watched, 'paceline_replicas{component="target",state="down"} 1.0')
    assert 'paceline_replicas{component="target",state="up"} 0.0' in answer
    assert 'paceline_model_info{component="coordinator",device="",digest="",dtype="",layout="",model=""' in answer


@pytest.mark.review
async def test_a_coordinator_tells_when_its_certificates_end(tmp_path: Path) -> None:
    """Review D9: no certificate's expiry was told."""
    authority = Authority(tmp_path)
    own = authority.issue("coordinator", not_after=datetime(2040, 1, 1, tzinfo=UTC))
    files = {"tls_certificate": own.certificate, "tls_key": own.key}
    async with waiting_coordinator(**files, tls_client_ca=authority.ca, models_ca=authority.ca) as watched:
        await scraped(watched, "paceline_certificate_not_after_seconds{")
        told = by_label(watched.registry, "certificate_not_after_seconds", "setting")
    (ca_s,) = end_times_s(authority.ca.read_bytes())
    ends_s = datetime(2040, 1, 1, tzinfo=UTC).timestamp()
    assert told == {"tls_certificate": ends_s, "tls_client_ca": ca_s, "models_ca": ca_s}


def test_a_replaced_certificate_and_an_authority_in_rotation_are_told_as_they_are_used(tmp_path: Path) -> None:
    authority, registry = Authority(tmp_path / "own"), new_registry("target")
    first, second = datetime(2040, 1, 1, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC)
    own = authority.issue("target", not_after=first)
    certificates = watch_certificates("--tls-certificate", own.certificate, own.key, authority.ca)
    registry.register(CertificateCollector("target", certificates))

    def end_s(setting: str) -> float:
        return value(registry, "certificate_not_after_seconds", component="target", setting=setting)

    assert end_s("tls_certificate") == first.timestamp()
    authority.issue("target", not_after=second)
    assert end_s("tls_certificate") == second.timestamp()
    # Files that cannot be used are not in use, and neither is their end.
    own.certificate.write_text("nothing")
    assert end_s("tls_certificate") == second.timestamp()


def test_a_chain_ends_with_its_first_certificate_and_a_bundle_of_authorities_with_its_last(tmp_path: Path) -> None:
    authority, registry = Authority(tmp_path), new_registry("target")
    early, late = datetime(2040, 1, 1, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC)
    own, other = authority.issue("own", not_after=late), authority.issue("other", not_after=early)
    both = own.certificate.read_bytes() + other.certificate.read_bytes()
    (tmp_path / "chain.pem").write_bytes(both)
    (tmp_path / "bundle.pem").write_bytes(both)
    certificates = watch_certificates("files", tmp_path / "chain.pem", own.key, tmp_path / "bundle.pem")
    registry.register(CertificateCollector("target", certificates))
    told = by_label(registry, "certificate_not_after_seconds", "setting")
    assert told == {"tls_certificate": early.timestamp(), "tls_client_ca": late.timestamp()}


def test_a_file_that_only_tls_can_read_costs_its_end_and_not_the_scrape() -> None:
    assert end_times_s(b"-----BEGIN CERTIFICATE-----\nbm90aGluZw==\n-----END CERTIFICATE-----\n") == []


@pytest.mark.review
def test_every_service_names_its_build() -> None:
    """Review D9: there was no `build_info`."""
    for component in ("coordinator", "draft", "target"):
        labels = {"component": component, "version": __version__, "wire_version": str(VERSION)}
        assert value(new_registry(component), "build_info", **labels) == 1


async def test_the_coordinator_names_the_model_that_it_serves() -> None:
    registry = new_registry("coordinator")
    async with fake_cluster(FakeDrafter(skill=1.0), FakeVerifier(), registry):
        served = describe("target")
        assert by_label(registry, "model_info", "model") == {served.model_id: 1}
        assert by_label(registry, "model_info", "component") == {"coordinator": 1}
        assert by_label(registry, "model_info", "digest") == {served.identity.model_digest: 1}


@pytest.mark.review
async def test_no_series_tells_when_another_was_created(all_registries: list[CollectorRegistry]) -> None:
    """Review D9: each counter and histogram had a `_created` series."""
    counted = ("paceline_requests_total", "paceline_pass_rows_bucket", "paceline_gateway_requests_total")
    for registry, name in zip(all_registries, counted, strict=True):
        for exposed in (generate_latest(registry).decode(), openmetrics(registry)):
            assert name in exposed
            assert "_created" not in exposed


@pytest.fixture
async def all_registries(tmp_path: Path) -> list[CollectorRegistry]:
    """A coordinator's, a model service's and a gateway's registry, after something of every kind was counted."""
    coordinator, (model, _), gateway = new_registry("coordinator"), model_registry(), new_registry("gateway")
    own = Authority(tmp_path).issue("target")
    model.register(CertificateCollector("target", watch_certificates("files", own.certificate, own.key, None)))
    for registry, service in ((coordinator, "coordinator"), (model, "target")):
        count_tasks(registry, service)
    async with fake_cluster(FakeDrafter(skill=1.0), FakeVerifier(), coordinator) as client:
        await client.complete(TEN_TOKENS)
    async with counted_calls(model) as (_, channel):
        await release(channel, "answer")
    async with scripted_door(ScriptedGenerator(pieces("a")), registry=gateway) as door:
        await door.complete()
    return [coordinator, model, gateway]


async def test_the_document_names_every_metric_with_its_type_and_labels(
    all_registries: list[CollectorRegistry],
) -> None:
    exposed = {
        (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
        )
        for registry in all_registries
        for family in registry.collect()
        if family.name.startswith("paceline_")
    }
    assert set(documented_metrics()) == exposed


async def test_names_and_types_pass_promtools_lint(all_registries: list[CollectorRegistry]) -> None:
    for registry in all_registries:
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
