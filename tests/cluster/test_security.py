"""The three services over mutual TLS: the same tokens, certificates rotated at run time, and strangers kept out."""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from coordinator.config import CoordinatorSettings
from coordinator.drafting import guarded_draft
from coordinator.replicas.clients import RemoteDrafter, RemoteVerifier
from coordinator.serving import running_coordinator
from draft_service.config import DraftSettings
from paceline.client import NO_RETRIES, Client, Completion
from paceline.codec.names import TARGET_SERVICE
from paceline.codec.status import error_from_pb
from paceline.engine.runner import Runner
from paceline.errors import PeerUnavailable, PrefixNotCached, SequenceNotFound, StartupError
from paceline.model_service import serving
from paceline.model_service.servicer import Answering
from paceline.model_service.worker import ModelWorker
from paceline.observe.metrics import new_registry
from paceline.process.instruments import Instruments
from paceline.process.ranks import joined_ranks
from paceline.process.service import server_options
from paceline.security.channels import ChannelSecurity, channel_security
from paceline.types import DraftSource, GenerationRequest, ProposeRow, TokenIds, Verdict, VerifyRow
from paceline.v1 import common_pb2, draft_service_pb2, target_service_pb2
from paceline.v1.draft_service_pb2_grpc import DraftServiceStub
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from paceline.wire import ServerOptions, open_channel
from target_service.config import TargetSettings
from target_service.servicer import add_target_service
from tests.certificates import Authority
from tests.clusters import ModelServer, calls_of_callers, cluster, held_up, model_server
from tests.conftest import PairOfCheckpoints

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
PROMPT = (20, 21, 22)
REQUEST = GenerationRequest(TokenIds(PROMPT), 24, ignore_end_tokens=True)


def guarded(authority: Authority, *allowed: str) -> ServerOptions:
    own = authority.issue("127.0.0.1")
    return server_options(
        DraftSettings(
            tls_certificate=own.certificate,
            tls_key=own.key,
            tls_client_ca=authority.ca,
            tls_allowed_names=",".join(allowed),
        )
    )


def showing(authority: Authority, *names: str) -> ChannelSecurity:
    own = authority.issue(*names)
    return channel_security(ca=authority.ca, certificate=own.certificate, key=own.key)


@dataclass(frozen=True)
class Guarded:
    """A cluster in which every hop is mutual TLS and clients show a token too."""

    address: str
    security: ChannelSecurity
    draft: ModelServer
    target: ModelServer
    settings: CoordinatorSettings


@asynccontextmanager
async def guarded_cluster(pair: PairOfCheckpoints, authority: Authority, folder: Path) -> AsyncIterator[Guarded]:
    coordinator = authority.issue("coordinator.test", "127.0.0.1")
    (folder / "tokens").write_text("a-token")
    models = guarded(authority, "coordinator.test", "inspector.test")
    inspector = showing(authority, "inspector.test")
    async with (
        model_server("target", pair.target, server_options=models, security=inspector) as target,
        model_server("draft", pair.draft, server_options=models, security=inspector) as draft,
    ):
        settings = CoordinatorSettings(
            draft=draft.address,
            target=target.address,
            lanes=1,
            models_ca=authority.ca,
            tls_certificate=coordinator.certificate,
            tls_key=coordinator.key,
            tls_client_ca=authority.ca,
            token_file=folder / "tokens",
        )
        client = authority.issue("client.test")
        security = channel_security(
            ca=authority.ca, certificate=client.certificate, key=client.key, token_file=folder / "tokens"
        )
        async with running_coordinator(settings, Instruments(new_registry("coordinator"))) as server:
            yield Guarded(server.address, security, draft, target, settings)


Outcome = tuple[list[int], bool]


def outcome(completion: Completion) -> Outcome:
    """Return the tokens, and whether the draft service drafted: a brief failure of its hop may show in nothing else."""
    sources = {one.source for one in completion.finish.usage.sources}
    return completion.token_ids, DraftSource.DRAFT in sources


async def truth(pair: PairOfCheckpoints, *requests: GenerationRequest) -> list[Outcome]:
    """Return the outcomes of a cluster without security."""
    async with cluster(pair.target, pair.draft, lanes=1) as plain:
        return [outcome(await plain.client.complete(request)) for request in requests]


async def test_over_mutual_tls_the_tokens_are_the_same(
    pairs: dict[str, PairOfCheckpoints], authority: Authority, tmp_path: Path
) -> None:
    pair = pairs["Llama"]
    async with (
        guarded_cluster(pair, authority, tmp_path) as running,
        Client(running.address, NO_RETRIES, security=running.security) as client,
    ):
        answer = outcome(await client.complete(REQUEST))
    assert [answer] == await truth(pair, REQUEST)
    assert running.target.runner.cache.sequence_count == running.draft.runner.cache.sequence_count == 0


async def test_everything_moves_to_another_authority_while_requests_run(
    pairs: dict[str, PairOfCheckpoints], authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a draft may be slower than it helps and not be asked for a while, though no hop failed.
    monkeypatch.setattr(guarded_draft, "LATE_S", math.inf)
    pair, successor = pairs["Llama"], Authority(tmp_path / "successor")
    long = GenerationRequest(TokenIds(PROMPT), 400, ignore_end_tokens=True)
    steps: list[Callable[[], None]] = [
        lambda: None,
        lambda: authority.trust(authority, successor),
        lambda: authority.renew(successor),
        lambda: authority.trust(successor),
    ]
    async with guarded_cluster(pair, authority, tmp_path) as running:
        client = Client(running.address, NO_RETRIES, security=running.security)
        with capture_logs() as events:
            async with client:
                under_way = asyncio.create_task(client.complete(long))
                answers = []
                for step in steps:
                    step()
                    answers += [outcome(await client.complete(REQUEST)) for _ in range(2)]
                answers.append(outcome(await under_way))
        late = showing(authority, "coordinator.test")
        async with open_channel(running.target.address, security=late) as channel:
            with pytest.raises(PeerUnavailable):
                await RemoteVerifier(channel, TIMEOUT_S).describe(TIMEOUT_S)
    expected, expected_long = await truth(pair, REQUEST, long)
    assert answers == [*[expected] * 8, expected_long]
    assert "replaced files are in use" in {one["event"] for one in events}
    assert not [one for one in events if one["log_level"] in ("warning", "error")]


async def test_a_coordinator_that_the_models_do_not_know_does_not_start_and_says_why(
    pairs: dict[str, PairOfCheckpoints], authority: Authority, tmp_path: Path
) -> None:
    async with model_server("target", pairs["Llama"].target, server_options=guarded(authority, "other.test")) as target:
        own = authority.issue("coordinator.test")
        settings = CoordinatorSettings(
            draft=target.address,
            target=target.address,
            models_ca=authority.ca,
            tls_certificate=own.certificate,
            tls_key=own.key,
            startup_timeout_s=5,
        )
        with pytest.raises(StartupError, match="bears none of the names in --tls-allowed-names"):
            async with running_coordinator(settings, Instruments(new_registry("coordinator"))):
                pass


async def test_the_same_id_of_two_callers_of_the_target_is_two_sequences(
    pairs: dict[str, PairOfCheckpoints], authority: Authority
) -> None:
    options, a, b = guarded(authority), showing(authority, "a.test"), showing(authority, "b.test")
    async with (
        model_server("target", pairs["Llama"].target, server_options=options, security=a) as server,
        open_channel(server.address, security=b) as channel,
    ):
        owner, other = RemoteVerifier(server.channel, TIMEOUT_S), RemoteVerifier(channel, TIMEOUT_S)
        whole, rest = VerifyRow("id", 0, PROMPT, ()), VerifyRow("id", 2, PROMPT[2:], ())
        (verdict,) = (await owner.verify([whole])).results
        assert isinstance(verdict, Verdict)
        assert isinstance((await other.verify([rest])).results[0], PrefixNotCached)
        rollback = target_service_pb2.RollbackTargetSequencesRequest(
            sequences=[common_pb2.SequenceLength(sequence_id="id", length=2)]
        )
        (failed,) = (await TargetServiceStub(channel).RollbackTargetSequences(rollback)).results
        assert failed.sequence_id == "id"
        assert isinstance(error_from_pb(failed.status), SequenceNotFound)
        other.owe(["id"])
        await other.release()
        authority.issue("a.test")  # a new certificate with the old name
        assert (await owner.verify([rest])).results == [verdict]
        assert (await other.verify([whole])).results == [verdict]
        assert server.runner.cache.sequence_count == 2
        (cut,) = (await TargetServiceStub(server.channel).RollbackTargetSequences(rollback)).results
        assert (cut.sequence_id, cut.cached_length) == ("id", 2)
        owner.owe(["id"])
        await owner.release()
        assert (await other.verify([rest])).results == [verdict]


async def test_the_same_id_of_two_callers_of_the_draft_is_two_sequences(
    pairs: dict[str, PairOfCheckpoints], authority: Authority
) -> None:
    options, a, b = guarded(authority), showing(authority, "a.test"), showing(authority, "b.test")
    async with (
        model_server("draft", pairs["Llama"].target, server_options=options, security=a) as server,
        open_channel(server.address, security=b) as channel,
    ):
        owner, other = RemoteDrafter(server.channel, TIMEOUT_S), RemoteDrafter(channel, TIMEOUT_S)
        whole, rest = ProposeRow("id", 0, PROMPT, 2), ProposeRow("id", 2, PROMPT[2:], 2)
        (proposal,) = (await owner.propose([whole])).results
        assert isinstance((await other.propose([rest])).results[0], PrefixNotCached)
        other.owe(["id"])
        await other.release()
        assert (await owner.propose([rest])).results == [proposal]
        rollback = draft_service_pb2.RollbackDraftSequencesRequest(
            sequences=[common_pb2.SequenceLength(sequence_id="id", length=2)]
        )
        (failed,) = (await DraftServiceStub(channel).RollbackDraftSequences(rollback)).results
        assert isinstance(error_from_pb(failed.status), SequenceNotFound)
        (cut,) = (await DraftServiceStub(server.channel).RollbackDraftSequences(rollback)).results
        assert (cut.sequence_id, cut.cached_length) == ("id", 2)
        owner.owe(["id"])
        await owner.release()
        assert server.runner.cache.sequence_count == 0


@asynccontextmanager
async def weighing_target(
    model: Path, authority: Authority, weights: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[str, ModelWorker]]:
    """Run a target service as its process does; yield its address and its worker."""
    own, listening = authority.issue("127.0.0.1"), asyncio.get_running_loop().create_future()
    settings = TargetSettings(
        model=str(model),
        port=0,
        threads=1,
        kv_memory="16MiB",
        caller_weights=weights,
        tls_certificate=own.certificate,
        tls_key=own.key,
        tls_client_ca=authority.ca,
    )
    workers = list[ModelWorker]()

    def add(runner: Runner, answering: Answering, server: Any) -> None:
        workers.append(answering.worker)
        add_target_service(runner, answering, server)

    monkeypatch.setattr(serving, "freeze_heap", lambda: None)  # the heap is that of other tests too
    monkeypatch.setattr(serving, "announce", lambda name, address, url: listening.set_result(address))
    async with joined_ranks("target_service", settings.grid) as ranks:
        options = server_options(settings)
        running = asyncio.create_task(
            serving.serve_model("target_service", settings, options, ranks, TARGET_SERVICE, add)
        )
        await asyncio.wait((listening, running), return_when=asyncio.FIRST_COMPLETED)
        try:
            yield listening.result(), workers[0]
        finally:
            running.cancel()
            await asyncio.wait((running,))


async def test_callers_of_a_service_have_the_weights_of_the_names_in_their_certificates(
    pairs: dict[str, PairOfCheckpoints], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        "heavy": ["chat.test"],
        "light": ["batch.test"],
        "both": ["both.test", "batch.test", "chat.test"],
        "other": ["other.test"],
    }
    weights = "batch.test=0.5,chat.test=3"
    async with (
        weighing_target(pairs["Llama"].target, authority, weights, monkeypatch) as (address, worker),
        AsyncExitStack() as stack,
    ):
        verifying = list[asyncio.Task[Any]]()
        async with held_up(worker):
            for sequence_id, shown in names.items():
                security = showing(authority, *shown)
                channel = await stack.enter_async_context(open_channel(address, security=security))
                row = VerifyRow(sequence_id, 0, PROMPT, ())
                verifying.append(asyncio.create_task(RemoteVerifier(channel, TIMEOUT_S).verify([row])))
            calls = await calls_of_callers(worker, len(names))
        await asyncio.gather(*verifying)
    found = {call.rows[0].sequence_id.removeprefix(call.caller.scope): call.caller.weight for call in calls}
    assert found == {"heavy": 3.0, "light": 0.5, "both": 3.0, "other": 1.0}


FORBIDDEN = re.compile(
    r"\bfrom pickle\b|\bpickle\.(?!UnpicklingError)\w|\btorch\.load\((?![^)]*weights_only=True)"
    r"|trust_remote_code\s*=\s*(?!False)|\byaml\.load\(|(?<![.\w])(eval|exec)\("
)


def test_no_source_loads_what_could_run_code() -> None:
    sources = [
        path
        for package in ("paceline", "coordinator", "draft_service", "target_service", "training", "benchmarks")
        for path in (ROOT / package).rglob("*.py")
    ]
    assert len(sources) > 100
    assert not [str(path) for path in sources if FORBIDDEN.search(path.read_text(encoding="utf-8"))]
