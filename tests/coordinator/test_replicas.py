"""Replicas found, watched and removed: names with several addresses, health, models that do not fit."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import structlog
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from coordinator.background import background
from coordinator.config import CoordinatorSettings
from coordinator.door.current_model import MOST_TOLD, CurrentModel
from coordinator.protocols import Remote
from coordinator.replicas import replica as replica_module
from coordinator.replicas.discovery import HostPort, parse_addresses, resolve
from coordinator.replicas.replica import FAILED_CHECKS_TO_LOSE, Replica
from coordinator.replicas.replicas import Replicas
from coordinator.requests.generation import Generation
from paceline.errors import CallTimedOut, IncompatiblePair, PacelineError, PeerUnavailable, WrongAnswer
from paceline.process.settings import parse_settings
from paceline.types import CacheDescription, ModelDescription, ReplicaState, TokenizerFiles
from tests.coordinators import admission, fits
from tests.fakes.model_services import FakeDrafter, FakeVerifier, describe
from tests.waits import until

NAME = HostPort("targets", 7702)


class Recorder:
    """Notes the replicas that it is told of."""

    def __init__(self) -> None:
        self.states: dict[str, list[str]] = {}

    def changed(self, replica: Replica[FakeVerifier]) -> None:
        self.states.setdefault(replica.address, []).append(replica.state.value)

    def left(self, replica: Replica[FakeVerifier]) -> None:
        self.states[replica.address].append("left")


def test_addresses_are_one_or_several_and_a_wrong_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_addresses("a:1, b.c:2,[::1]:3") == [HostPort("a", 1), HostPort("b.c", 2), HostPort("[::1]", 3)]
    for wrong in ("host", "host:", ":5", "a:1,b", "a:x", "a:0", "a:65536", ""):
        with pytest.raises(SystemExit):
            parse_settings(CoordinatorSettings, "coordinator", ["--target", wrong, "--draft", "d:1"])
        assert "is no HOST:PORT; give one, or several separated by commas" in capsys.readouterr().err


async def test_an_address_is_its_own_and_a_name_with_both_families_counts_once() -> None:
    assert await resolve(HostPort("127.0.0.1", 5)) == {"127.0.0.1:5"}
    assert await resolve(HostPort("[::1]", 5)) == {"[::1]:5"}
    assert await resolve(HostPort("localhost", 5)) == {"127.0.0.1:5"}


async def test_replicas_that_join_are_taken_in_and_those_that_leave_are_let_go_when_they_are_down() -> None:
    found: list[set[str]] = [{"1:1", "2:1"}, {"2:1", "3:1"}, {"2:1", "3:1"}]
    remotes: dict[str, FakeVerifier] = {}
    recorder = Recorder()

    async def resolve_next(address: HostPort) -> set[str]:
        assert address == NAME
        return found.pop(0)

    def connect(place: str, address: HostPort) -> FakeVerifier:
        return remotes.setdefault(place, FakeVerifier())

    async with background() as tasks:
        replicas = Replicas([NAME], connect, fits, recorder, tasks, resolve_next)
        await replicas.refresh()
        await replicas.looked()
        assert {one.address for one in replicas.up} == {"1:1", "2:1"}
        await replicas.refresh()
        gone, *_ = (one for one in replicas.all if one.address == "1:1")
        await gone.look()
        assert gone.state is ReplicaState.DRAINING
        remotes["1:1"].away = PeerUnavailable("gone")
        for _ in range(FAILED_CHECKS_TO_LOSE):
            await gone.look()
        await replicas.refresh()
        await replicas.looked()
        assert {one.address for one in replicas.up} == {"2:1", "3:1"}
    assert recorder.states["1:1"] == ["down", "up", "draining", "down", "left"]
    assert recorder.states["3:1"] == ["down", "up"]
    assert all(remote.is_closed for remote in remotes.values())


async def test_a_stranger_at_the_address_of_a_replica_that_left_is_let_go() -> None:
    """It was asked for its health twice a second, and shown as refused, for as long as it lived."""
    found = [{"1:1"}, {"1:1"}, set[str]()]
    remote, recorder = FakeVerifier(), Recorder()

    async def resolve_next(address: HostPort) -> set[str]:
        return found.pop(0)

    async def fit(replica: Replica[FakeVerifier], model: ModelDescription) -> None:
        if model.model_id == "stranger":
            raise IncompatiblePair("no service of ours")

    async with background() as tasks:
        replicas = Replicas([NAME], lambda place, address: remote, fit, recorder, tasks, resolve_next)
        await replicas.refresh()
        await replicas.looked()
        (replica,) = replicas.up
        remote.description = describe("stranger")
        replica.lose(PeerUnavailable("gone"))
        await replica.look()
        await replicas.refresh()
        assert replicas.all == [replica]  # a name leads to it: it may come back as it should
        await replicas.refresh()
        assert replicas.all == []
    assert recorder.states["1:1"] == ["down", "up", "down", "refused", "left"]


async def test_a_name_that_cannot_be_resolved_leads_where_it_led() -> None:
    answers: list[set[str] | OSError] = [OSError("no such name"), {"1:1"}, OSError("no such name")]

    async def resolve_next(address: HostPort) -> set[str]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async with background() as tasks:
        replicas = Replicas([NAME], lambda place, address: FakeVerifier(), fits, Recorder(), tasks, resolve_next)
        await replicas.refresh()
        assert replicas.all == []
        for _ in range(2):
            await replicas.refresh()
            await replicas.looked()
            assert [one.address for one in replicas.up] == ["1:1"]


async def test_a_replica_is_lost_by_a_failed_call_or_by_two_failed_looks_and_found_again() -> None:
    remote = FakeDrafter(1.0)
    replica = Replica("1:1", remote, fits)
    await replica.look()
    assert replica.is_up
    remote.away = CallTimedOut("stopped")
    for count in range(FAILED_CHECKS_TO_LOSE):
        assert replica.is_up, count
        await replica.look()
    assert (replica.state, replica.error) == (ReplicaState.DOWN, remote.away)
    remote.away = None
    await replica.look()
    assert replica.is_up
    replica.lose(PeerUnavailable("cut"))
    assert replica.state is ReplicaState.DOWN
    await replica.look()
    assert replica.is_up


async def test_a_draining_replica_survives_a_failed_look_as_one_that_is_up_does() -> None:
    """One late check ended all streams of a target that was about to be replaced."""
    remote = FakeVerifier()
    replica = Replica("1:1", remote, fits)
    await replica.look()
    remote.is_draining = True
    await replica.look()
    for _ in range(2):  # what answers between them counts
        remote.away = CallTimedOut("busy for a moment")
        await replica.look()
        assert replica.state is ReplicaState.DRAINING and replica.fits
        remote.away = None
        await replica.look()
    remote.away = PeerUnavailable("gone")
    for _ in range(FAILED_CHECKS_TO_LOSE):
        assert replica.state is ReplicaState.DRAINING
        await replica.look()
    assert replica.state is ReplicaState.DOWN and not replica.fits


async def test_a_replica_that_ends_a_stream_is_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "UP_CHECK_INTERVAL_S", 3600.0)
    remote = FakeVerifier()
    replica = Replica("1:1", remote, fits)
    async with background() as tasks:
        watch = tasks.start(replica.watch())
        await replica.looked.wait()
        assert replica.is_up
        remote.is_draining = True
        remote.end_stream(None)
        await until(lambda: replica.state is ReplicaState.DRAINING)
        watch.cancel()


async def test_what_a_replica_sends_unasked_is_logged_ever_more_rarely() -> None:
    remote = FakeVerifier()
    replica = Replica("1:1", remote, fits)
    async with background() as tasks:
        watch = tasks.start(replica.watch())
        await replica.looked.wait()
        with structlog.testing.capture_logs() as lines:
            for _ in range(9):
                remote.end_stream(WrongAnswer("garbage"))
        watch.cancel()
    told = [one["count"] for one in lines if one["event"] == "a stream was ended"]
    assert told == [1, 2, 4, 8]


@pytest.mark.parametrize("ticks", range(6))
async def test_a_watch_ends_though_it_is_told_to_look_in_the_same_moment(
    ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams end when a coordinator stops, so both come together there."""
    monkeypatch.setattr(replica_module, "UP_CHECK_INTERVAL_S", 3600.0)
    replica = Replica("1:1", FakeVerifier(), fits)
    watch = asyncio.create_task(replica.watch())
    await replica.looked.wait()
    for _ in range(6):
        await asyncio.sleep(0)  # until it waits
    replica.look_soon()
    for _ in range(ticks):
        await asyncio.sleep(0)
    watch.cancel()
    await until(watch.done)
    assert watch.cancelled()


async def test_what_is_owed_is_freed_by_the_next_look_that_finds_it() -> None:
    remote = FakeDrafter(1.0)
    remote.token_ids = {"a": [1], "b": [2]}
    remote.away = PeerUnavailable("gone")
    with pytest.raises(PeerUnavailable):
        remote.owe(["a"])
        await remote.release()
    replica = Replica("1:1", remote, fits)
    remote.away = None
    await replica.look()
    assert list(remote.token_ids) == ["b"]


@pytest.mark.parametrize(
    ("is_draining", "is_named", "state"),
    [
        (False, True, ReplicaState.UP),
        (True, True, ReplicaState.DRAINING),
        (False, False, ReplicaState.DRAINING),
    ],
)
async def test_a_replica_that_is_too_busy_to_free_what_is_owed_is_not_away(
    is_draining: bool, is_named: bool, state: ReplicaState
) -> None:
    """Its health was good, and a release that waited for a long pass made it lose its sequences' caches."""

    class Busy(FakeVerifier):
        async def release(self) -> int:
            raise CallTimedOut("deadline exceeded")

    remote = Busy()
    replica = Replica("1:1", remote, fits)
    await replica.look()
    remote.owe(["a"])
    remote.is_draining = is_draining
    replica.set_named(is_named)
    for _ in range(2 * FAILED_CHECKS_TO_LOSE):
        await replica.look()
        assert replica.state is state and replica.fits


def other(**changes: str | int) -> ModelDescription:
    return replace(describe("target", "print"), **changes)  # type: ignore[arg-type]


async def serving(first: ModelDescription, tokenizer: TokenizerFiles | None = None) -> CurrentModel:
    """Return the served model while a target like `first` is left."""

    class Left:
        def has_fitting(self, besides: Replica[Remote]) -> bool:
            return besides.remote is not remote

        def end(self, reason: Callable[[Generation], PacelineError | None]) -> None:
            raise AssertionError("nothing ends")

        def look_anew(self, reason: PacelineError) -> None:
            """There is no draft."""

    remote = FakeVerifier()
    remote.description, remote.tokenizer = first, tokenizer
    model = CurrentModel(admission, left := Left(), left)
    await Replica("0:1", remote, model.check_target).look()
    return model


async def judged(model: CurrentModel, described: ModelDescription) -> Replica[FakeVerifier]:
    remote = FakeVerifier()
    remote.description = described
    replica = Replica("1:1", remote, model.check_target)
    await replica.look()
    return replica


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (other(model_id="another"), "has model_id 'another', and what is served (target) 'target'"),
        (other(tokenizer_fingerprint="x"), "tokenizer_fingerprint 'x'"),
        (other(dtype="bfloat16"), "dtype 'bfloat16', and what is served (target) 'float32'"),
        (other(numerics="strict"), "numerics 'strict'"),
        (replace(other(), cache=CacheDescription(max_length=9)), "sequences of 9 tokens, and what is served 1000"),
    ],
)
async def test_a_target_unlike_the_first_is_refused_by_name_until_it_comes_back_as_it_should(
    model: ModelDescription, words: str
) -> None:
    replica = await judged(await serving(other()), model)
    assert replica.state is ReplicaState.REFUSED
    assert words in str(replica.error)
    replica.remote.description = other()
    await replica.look()
    assert replica.is_up


ONE, ANOTHER = "1" * 64, "a" * 64


def digested(**changes: str | int) -> ModelDescription:
    return other(**{"weights_digest": ONE, "configuration_digest": ONE} | changes)


@pytest.mark.review  # C1
async def test_replicas_are_told_apart_by_their_weights_whatever_their_names() -> None:
    model = await serving(digested())
    assert (await judged(model, digested(model_id="/models/of/another/path", revision="main"))).is_up
    for field in ("weights_digest", "configuration_digest"):
        words = f"(target) has {field} '{ANOTHER[:12]}', and what is served (target) '{ONE[:12]}'"
        assert words in str((await judged(model, digested(**{field: ANOTHER}))).error)


@pytest.mark.review  # C1
async def test_a_replica_that_tells_no_digest_is_known_by_its_name() -> None:
    for first, second in ((digested(), other()), (other(), digested())):
        model = await serving(first)
        assert (await judged(model, second)).is_up
        assert "model_id 'another'" in str((await judged(model, replace(second, model_id="another"))).error)


@pytest.mark.review  # C1
async def test_other_kernels_are_refused_where_bits_are_promised_and_else_told_once() -> None:
    strict = await judged(
        await serving(digested(numerics="strict", kernels="cpu AVX2")),
        digested(numerics="strict", kernels="cpu AVX512"),
    )
    assert "kernels 'cpu AVX512'" in str(strict.error)
    assert "start all with --numerics fast, or on one kind" in str(strict.error)
    fast = await serving(digested(kernels="cpu AVX2"))
    with structlog.testing.capture_logs() as logs:
        for kernels in ("cpu AVX512", "cpu AVX512", "cpu AVX2"):
            assert (await judged(fast, digested(kernels=kernels))).is_up
    assert [(one["kernels"], one["first"]) for one in logs if "kernels" in one] == [("cpu AVX512", "cpu AVX2")]


async def test_a_draft_that_lacks_tokens_of_its_target_is_told_once_and_used() -> None:
    tokenizer = Tokenizer(WordLevel({"known": 0, "unknown": 1}, unk_token="unknown"))
    last = 2
    tokenizer.add_special_tokens(["<|tool|>"])
    model = await serving(other(vocabulary_size=last + 8), TokenizerFiles(tokenizer.to_str()))
    with structlog.testing.capture_logs() as logs:
        for count in (last, last, last + 1):
            draft = FakeDrafter(1.0)
            draft.description = describe(f"draft of {count}", "print", vocabulary_size=count)
            replica = Replica("2:1", draft, model.check_draft)
            await replica.look()
            assert replica.is_up
    told = [(one["draft"], one["first_lacking_id"]) for one in logs if "first_lacking_id" in one]
    assert told == [(f"draft of {last}", last)]


async def test_what_is_told_of_drafts_is_told_anew_of_another_target_and_of_few_names() -> None:
    """A draft that lacked tokens of the target was not told of where it had lacked some of the one before."""

    class NoneLeft:
        def has_fitting(self, besides: Replica[Remote]) -> bool:
            return False

        def end(self, reason: Callable[[Generation], PacelineError | None]) -> None:
            """There is no generation."""

        def look_anew(self, reason: PacelineError) -> None:
            """There is no draft."""

    tokenizer = Tokenizer(WordLevel({"known": 0, "unknown": 1}, unk_token="unknown"))
    model, draft = CurrentModel(admission, left := NoneLeft(), left), FakeDrafter(1.0)
    names = [f"draft {number}" for number in range(2 * MOST_TOLD)]
    with structlog.testing.capture_logs() as logs:
        for target_name in ("one", "another"):
            target = FakeVerifier()
            target.description = other(model_id=target_name)
            target.tokenizer = TokenizerFiles(tokenizer.to_str())
            await Replica("1:1", target, model.check_target).look()
            for name in names:
                draft.description = describe(name, "print", vocabulary_size=1)
                await Replica("2:1", draft, model.check_draft).look()
    assert [one["draft"] for one in logs if "first_lacking_id" in one] == 2 * names[:MOST_TOLD]


async def test_a_draft_of_another_family_is_refused() -> None:
    model = await serving(other())
    draft = FakeDrafter(1.0)
    replica = Replica("2:1", draft, model.check_draft)
    draft.description = describe("draft", "other")
    await replica.look()
    assert "different tokenizers" in str(replica.error)
    draft.description = describe("draft", "print")
    await replica.look()
    assert replica.is_up
