"""The soak and the overload run judge correctly: over fake models with known outputs."""

import asyncio
import signal
from collections import Counter
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.overload import arrivals
from benchmarks.overload.arrivals import Capacity, Watched
from benchmarks.soak import clients, faults
from benchmarks.soak.changing_model import WEIGHTS, ChangingModel
from benchmarks.soak.clients import Failure, Soaker, Tally
from benchmarks.soak.cluster import Member, ProcessCluster, SoakOptions
from benchmarks.soak.faults import KINDS, TWIN_KINDS, Fault, Faults
from benchmarks.soak.report import is_sound, problems, summary, table, untolerated
from benchmarks.soak.requests import Asked, make_requests, with_references
from benchmarks.soak.run import Plan, Result
from benchmarks.soak.samples import Sample, broken_requests, exceeding, growth, leaks
from benchmarks.soak.troubles import ERRORS, HANG, Trouble
from paceline.builtin import resolve_model
from paceline.client import Client
from paceline.errors import PeerFailed
from paceline.measure.load.load import LoadLog, Outcome, SentRequest, run_load
from paceline.process.service_process import Endpoint
from paceline.types import GenerationRequest, TokenIds
from tests.coordinators import fake_cluster
from tests.fakes.model_services import FakeDrafter, FakeVerifier, HeldVerifier, continuation

REQUESTS = [("greedy", GenerationRequest(TokenIds((5, number)), 30)) for number in range(4)]
IDLE = Sample("target-0", at_s=0, rss_bytes=400 << 20, open_files=30, tasks=5, sequences=0)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_READING_PAUSE_S", 0.0)


async def soaked(client: Client, asked: list[Asked], request_count: int) -> Tally:
    """Ask until `request_count` requests have ended."""
    soaker, enough = Soaker(client, asked, seed=1, began_s=0.0), asyncio.Event()
    running = asyncio.create_task(soaker.run(3, enough))
    while soaker.tally.request_count < request_count:
        await asyncio.sleep(0)
    enough.set()
    await running
    return soaker.tally


def result(tally: Tally, *, faults: tuple[Fault, ...] = (), tolerated: tuple[str, ...] = ()) -> Result:
    return Result(Plan(tolerated=tolerated), tally, list(faults), [IDLE], [IDLE] * 3)


async def test_references_are_the_targets_own_and_right_outputs_pass_however_they_are_asked_for() -> None:
    async with fake_cluster(FakeDrafter(skill=0.5), FakeVerifier(), CollectorRegistry()) as client:
        asked = await with_references(client, REQUESTS)
        assert [list(*one.outputs) for one in asked] == [continuation((5, number), 30) for number in range(4)]
        tally = await soaked(client, asked, 60)
    assert not tally.mismatches
    assert not tally.failures
    assert set(tally.ended) == {"to the end", "cancelled", "deadline", "in two parts", "with a pause"}
    assert is_sound(result(tally))


async def test_an_output_that_is_wrong_or_too_short_is_a_mismatch() -> None:
    async with fake_cluster(FakeDrafter(skill=0.5), FakeVerifier(), CollectorRegistry()) as client:
        (right, *_) = await with_references(client, REQUESTS[:1])
        for wrong in ((*right.outputs[0][:-1], 49), (*right.outputs[0], 4)):
            tally = await soaked(client, [replace(right, outputs=(wrong,))], 20)
            assert tally.mismatches
            assert not is_sound(result(tally))


async def test_a_request_that_fails_is_counted_with_its_reason() -> None:
    verifier = FakeVerifier()
    async with fake_cluster(FakeDrafter(skill=0.5), verifier, CollectorRegistry()) as client:
        asked = await with_references(client, REQUESTS)

        def fail(number: int) -> None:
            raise RuntimeError("broken")

        verifier.before = fail
        tally = await soaked(client, asked, 2)
    assert {failure.reason for failure in tally.failures} == {"PEER_FAILED"}
    assert not is_sound(result(tally))


def test_a_failure_is_tolerated_only_beside_a_fault_that_may_cause_it() -> None:
    tally = Tally(failures=[Failure("greedy", "PEER_UNAVAILABLE", "gone", 100, 101)])
    near, far = Fault("kill target", "target-0", 99, 100.5), Fault("kill target", "target-0", 300, 310)
    assert untolerated(result(tally, faults=(near,), tolerated=("kill target",))) == []
    assert untolerated(result(tally, faults=(near,))) == tally.failures
    assert untolerated(result(tally, faults=(far,), tolerated=("kill target",))) == tally.failures
    assert untolerated(result(tally, faults=(near,), tolerated=("kill draft",))) == tally.failures


def test_a_report_tells_what_is_wrong() -> None:
    tally = Tally(mismatches=["greedy, to the end"], failures=[Failure("long", "PEER_FAILED", "why", 1, 2)])
    found = replace(result(tally), leaks=["target-0: 3 sequences"])
    assert problems(found) == [
        "greedy, to the end",
        "failed: long: PEER_FAILED: why",
        "target-0: 3 sequences",
    ]
    assert summary(found)["failures_untolerated"] == 1
    assert "mismatches" in table(found).columns[0]._cells


def test_steady_memory_and_an_idle_cluster_as_before_are_no_leak() -> None:
    steady = [replace(IDLE, rss_bytes=size << 20) for size in (100, 150, 400, 402, 399, 401, 400, 405, 401)]
    assert growth(steady) == {"target-0": (401 << 20, 401 << 20)}
    assert leaks(steady, [IDLE], [IDLE]) == []


def test_growing_memory_and_what_is_left_behind_are_leaks() -> None:
    growing = [replace(IDLE, rss_bytes=(400 + 10 * number) << 20) for number in range(30)]
    assert leaks(growing, [IDLE], [IDLE]) == ["target-0: memory grew from 545 to 645 MiB"]
    after = replace(IDLE, tasks=6, sequences=2, open_files=99)
    assert [line.partition(",")[0] for line in leaks([], [IDLE], [after])] == [
        "target-0: 2 sequences",
        "target-0: 6 tasks",
        "target-0: 99 open files",
    ]


def test_only_a_service_that_took_more_than_it_was_given_exceeds_its_memory() -> None:
    taken = [replace(IDLE, peak_bytes=size << 20) for size in (700, 705, 690)]
    taken += [replace(IDLE, member="draft-1", peak_bytes=592 << 20)]
    assert exceeding(taken, SoakOptions(target_memory="704MiB", draft_memory="592MiB").memory_bytes) == [
        "target-0: took 705 MiB of 704"
    ]
    assert exceeding(taken, SoakOptions().memory_bytes) == []
    over = replace(result(Tally()), exceeding=["target-0: took 705 MiB of 704"])
    assert not is_sound(over) and problems(over) == over.exceeding


def test_broken_requests_are_summed_over_the_processes_of_a_coordinator() -> None:
    counts = [0, 2, 3, 0, 1, 1, 4]
    samples = [replace(IDLE, member="coordinator", broken_requests=count) for count in counts]
    assert broken_requests(samples) == 3 + 4


def test_requests_of_all_kinds_come_again_from_the_same_seed() -> None:
    assert make_requests(12, seed=3) == make_requests(12, seed=3)
    assert len({kind for kind, _ in make_requests(12, seed=3)}) == 6


async def test_under_overload_all_refusals_say_when_to_come_again_and_what_is_accepted_is_right() -> None:
    verifier = HeldVerifier(0)
    verifier.open.set()
    async with fake_cluster(FakeDrafter(skill=0.5), verifier, CollectorRegistry(), queue_limit=2) as client:
        asked = await with_references(client, REQUESTS[:1])
        watched, log = Watched(client, asked), LoadLog()
        verifier.open.clear()
        sending = asyncio.create_task(run_load(zip(repeat(0.0, 20), repeat(asked[0].request)), watched.generate, log))
        while watched.refusals.total() < 10:
            await asyncio.sleep(0)
        verifier.open.set()
        await sending
    assert log.count(Outcome.REJECTED) == watched.refusals["RetryInfo"] >= 10
    assert log.count(Outcome.COMPLETED) == 20 - log.count(Outcome.REJECTED) > 0
    assert (watched.refusals["no RetryInfo"], watched.mismatch_count) == (0, 0)


@pytest.mark.parametrize(("served_per_s", "sound"), [(9.0, True), (1.0, False)])
def test_latency_under_overload_is_bounded_by_what_was_served_before_it(served_per_s: float, sound: bool) -> None:
    """The bound was made of the rate under overload, so however slow refusals made the cluster, it grew as much."""
    full = 17 / served_per_s  # seconds in which a full queue and the request itself are served
    log = LoadLog()
    for number in range(40):
        arrived_s = number / served_per_s
        log.records.append(SentRequest(arrived_s, arrived_s, arrived_s + full, Outcome.COMPLETED))
    log.records.append(SentRequest(0.0, 0.0, 0.0, Outcome.REJECTED))
    watched = Watched(cast(Any, None), (), Counter({"RetryInfo": 1}))
    found = arrivals.summary(Capacity(10.0, 0.5), 5.0, 16, watched, log) | {"left_in_the_pool": 0}
    assert arrivals.is_sound(found) == sound


class Recorded:
    """A process and a model that only record calls."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def __getattr__(self, name: str) -> Any:
        async def act() -> None:
            self._done.append(name)

        return act

    def send_signal(self, number: signal.Signals) -> None:
        self._done.append(number.name)

    def change(self) -> None:
        self._done.append("change")

    def restore(self) -> None:
        self._done.append("restore")


async def disturbed(kinds: tuple[str, ...], target_count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the faults of a cluster until every possible kind came once."""
    for name in ("MAX_DOWN_S", "MAX_PAUSE_S", "MAX_HANG_S"):
        monkeypatch.setattr(faults, name, 0.0)
    done: list[str] = []
    recorded = cast(Any, Recorded(done))
    roles = ["target"] * target_count + ["draft", "coordinator"]
    members = tuple(Member(role, role, recorded, Endpoint("x:1")) for role in roles)
    disturbing, over = (
        Faults(ProcessCluster(members, recorded), kinds, gap_s=(0.001, 0.001), seed=1, began_s=0),
        asyncio.Event(),
    )
    wanted = set(kinds) if target_count > 1 else set(kinds) - set(TWIN_KINDS)
    running = asyncio.create_task(disturbing.run(over))
    while {one.kind for one in disturbing.done} != wanted:
        await asyncio.sleep(0)
    over.set()
    await running
    return done


@pytest.mark.review
@pytest.mark.parametrize(
    ("kind", "done"),
    [
        ("pause draft", ["SIGSTOP", "SIGCONT"]),
        ("fail target", [ERRORS.name, ERRORS.name]),
        ("hang target", [HANG.name, HANG.name]),
        ("join target", ["stop", "start"]),
        ("change target", ["change", "kill", "start", "restore", "kill", "start"]),
    ],
)
async def test_after_a_fault_the_service_is_as_it_was(
    kind: str, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await disturbed((kind,), 2, monkeypatch)
    assert found[: len(done)] == done
    assert len(found) % len(done) == 0


@pytest.mark.review
async def test_a_target_without_a_twin_is_spared_what_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(await disturbed(KINDS, 1, monkeypatch)) == {"kill", "start", "SIGSTOP", "SIGCONT"}


async def test_a_troubled_target_fails_or_hangs_until_it_is_told_again() -> None:
    trouble = Trouble()
    await trouble.strike()
    trouble.toggle(ERRORS, None)
    with pytest.raises(PeerFailed):
        await trouble.strike()
    trouble.toggle(ERRORS, None)
    trouble.toggle(HANG, None)
    hanging = asyncio.create_task(trouble.strike())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not hanging.done()
    trouble.toggle(HANG, None)
    await hanging


def test_a_model_that_changes_has_the_same_name_and_other_weights(tmp_path: Path) -> None:
    model = ChangingModel(resolve_model("builtin:draft"), tmp_path)
    own = (model.path / WEIGHTS).read_bytes()
    model.change()
    other = (model.path / WEIGHTS).read_bytes()
    assert len(other) == len(own)
    assert other != own
    model.restore()
    assert (model.path / WEIGHTS).read_bytes() == own
