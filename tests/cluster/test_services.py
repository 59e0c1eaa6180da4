"""The model services over real gRPC: the state protocol row by row, health, reflection, and bad input."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from coordinator.replicas.clients import RemoteDrafter, RemoteVerifier
from draft_service.drafter import Drafter
from draft_service.preparing import Preparing
from draft_service.servicer import DraftServicer
from paceline.codec.status import error_from_pb
from paceline.engine.cache.paged import KvPool
from paceline.engine.options import EngineOptions
from paceline.engine.runner import PassSize
from paceline.errors import (
    DuplicateSequence,
    InvalidRequest,
    Overloaded,
    PacelineError,
    PrefixNotCached,
    SequenceNotFound,
    TokenizerNotFound,
)
from paceline.model_service.servicer import Answering
from paceline.model_service.serving import until_empty
from paceline.types import PreparedDrafts, Proposal, ProposeRow, Verdict, VerifyOutcome, VerifyRow
from paceline.v1 import common_pb2, draft_service_pb2, target_service_pb2
from paceline.v1.draft_service_pb2_grpc import DraftServiceStub
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from paceline.wire import translated_errors
from tests.checkpoints import MAX_LENGTH, VOCABULARY_SIZE
from tests.clusters import ModelServer, held_up, model_server
from tests.conftest import PairOfCheckpoints
from tests.waits import until

TIMEOUT_S = 60.0
PROMPT = (20, 21, 22, 23)


@pytest.fixture
async def target(pairs: dict[str, PairOfCheckpoints]) -> AsyncIterator[ModelServer]:
    async with model_server("target", pairs["Llama"].target) as server:
        yield server


@pytest.fixture
async def draft(pairs: dict[str, PairOfCheckpoints]) -> AsyncIterator[ModelServer]:
    async with model_server("draft", pairs["Llama"].target) as server:
        yield server


async def verify(server: ModelServer, *rows: VerifyRow) -> list[VerifyOutcome | PacelineError]:
    return (await RemoteVerifier(server.channel, TIMEOUT_S).verify(rows)).results


async def decode(server: ModelServer, prompt: tuple[int, ...], count: int) -> list[int]:
    """Decode plainly with one whole resend a token: slow but surely right."""
    token_ids = list(prompt)
    for _ in range(count):
        (verdict,) = await verify(server, VerifyRow("reference", 0, tuple(token_ids), ()))
        assert isinstance(verdict, Verdict)
        token_ids.append(verdict.next_token_id)
    return token_ids[len(prompt) :]


async def test_further_rounds_without_drafts_come_with_the_first(target: ModelServer) -> None:
    (verdict,) = await verify(target, VerifyRow("a", 0, PROMPT, (), further_count=2))
    assert isinstance(verdict, Verdict)
    rounds = (verdict, *verdict.further)
    assert [one.next_token_id for one in rounds] == await decode(target, PROMPT, 3)
    assert [one.cached_length for one in rounds] == [len(PROMPT) + place for place in range(3)]


async def test_drafts_are_accepted_up_to_the_first_wrong_one(target: ModelServer) -> None:
    right = await decode(target, PROMPT, 4)
    wrong = (right[2] + 1) % VOCABULARY_SIZE
    results = await verify(
        target,
        VerifyRow("a", 0, PROMPT, (right[0], right[1], wrong)),
        VerifyRow("b", 0, PROMPT, tuple(right[:3])),
        VerifyRow("c", 0, PROMPT, ()),
    )
    assert results == [Verdict(2, right[2], 6), Verdict(3, right[3], 7), Verdict(0, right[0], 4)]
    assert [target.runner.cache.length(one) for one in "abc"] == [6, 7, 4]


async def test_repeating_a_call_repeats_its_answer(target: ModelServer) -> None:
    row = VerifyRow("a", 0, PROMPT, (1, 2))
    assert await verify(target, row) == await verify(target, row)
    again = VerifyRow("a", 2, PROMPT[2:], (1, 2))
    assert await verify(target, again) == await verify(target, again) == await verify(target, row)


async def test_a_bad_row_fails_alone(target: ModelServer) -> None:
    good = VerifyRow("good", 0, PROMPT, ())
    (alone,) = await verify(target, good)
    cases: list[tuple[VerifyRow, type[PacelineError], str]] = [
        (VerifyRow("new", 3, (20,), ()), PrefixNotCached, "beyond the 0 cached"),
        (VerifyRow("good", 0, PROMPT, ()), DuplicateSequence, "earlier row"),
        (VerifyRow("", 0, PROMPT, ()), InvalidRequest, "sequence_id"),
        (VerifyRow("x" * 129, 0, PROMPT, ()), InvalidRequest, "sequence_id"),
        (VerifyRow("minus", -1, PROMPT, ()), InvalidRequest, "base_length"),
        (VerifyRow("empty", 0, (), (1,)), InvalidRequest, "token_ids"),
        (VerifyRow("vocabulary", 0, (VOCABULARY_SIZE,), ()), InvalidRequest, "outside the vocabulary"),
        (VerifyRow("negative", 0, (-1,), ()), InvalidRequest, "outside the vocabulary"),
        (VerifyRow("drafts", 0, PROMPT, (VOCABULARY_SIZE,)), InvalidRequest, "draft_token_ids"),
        (VerifyRow("long", 0, (5,) * (MAX_LENGTH + 1), ()), InvalidRequest, str(MAX_LENGTH)),
    ]
    results = await verify(target, good, *(row for row, _, _ in cases))
    assert results[0] == alone
    for result, (_, kind, words) in zip(results[1:], cases, strict=True):
        assert type(result) is kind
        assert words in str(result)
    assert target.runner.cache.sequence_count == 1


async def test_a_base_beyond_the_cache_names_the_cached_length_and_keeps_it(target: ModelServer) -> None:
    await verify(target, VerifyRow("a", 0, PROMPT, ()))
    (result,) = await verify(target, VerifyRow("a", 5, (9,), ()))
    assert isinstance(result, PrefixNotCached)
    assert result.metadata == {"cached_length": "4"}
    assert target.runner.cache.length("a") == 4


async def test_a_call_without_rows_is_refused(target: ModelServer, draft: ModelServer) -> None:
    with pytest.raises(InvalidRequest, match="rows is empty"):
        await verify(target)
    with pytest.raises(InvalidRequest, match="rows is empty"):
        await RemoteDrafter(draft.channel, TIMEOUT_S).propose([])


async def test_a_full_cache_fails_the_row_with_a_time_to_retry(pairs: dict[str, PairOfCheckpoints]) -> None:
    async with model_server("target", pairs["Llama"].target, EngineOptions(kv_memory="2KiB", page_tokens=4)) as server:
        results = await verify(server, *(VerifyRow(one, 0, PROMPT, ()) for one in "abc"))
        assert [isinstance(result, Verdict) for result in results] == [True, False, False]
        assert isinstance(results[1], Overloaded)
        assert results[1].retry_after_s > 0


async def test_the_draft_proposes_its_models_own_greedy_tokens_and_rows_may_want_different_counts(
    draft: ModelServer, target: ModelServer
) -> None:
    own = await decode(target, PROMPT, 5)
    drafter = RemoteDrafter(draft.channel, TIMEOUT_S)
    results = (await drafter.propose([ProposeRow("a", 0, PROMPT, 5), ProposeRow("b", 0, PROMPT, 2)])).results
    assert results == [Proposal(tuple(own), 8), Proposal(tuple(own[:2]), 5)]
    follow = (await drafter.propose([ProposeRow("a", 8, (own[4],), 1)])).results
    assert follow == [Proposal(tuple(await decode(target, (*PROMPT, *own), 1)), 9)]


@pytest.fixture
def servicers(monkeypatch: pytest.MonkeyPatch) -> list[DraftServicer]:
    """Servicers of draft services, as they are made."""
    made, begin = list[DraftServicer](), DraftServicer.__init__

    def noted(servicer: DraftServicer, drafter: Drafter, answering: Answering) -> None:
        made.append(servicer)
        begin(servicer, drafter, answering)

    monkeypatch.setattr(DraftServicer, "__init__", noted)
    return made


class _Over:
    """Says after so many readings that calls stay away."""

    def __init__(self, most: int) -> None:
        self._left = most
        self.told = asyncio.Event()

    def asked(self) -> None: ...
    def answered(self) -> None: ...

    @property
    def is_over(self) -> bool:
        self._left -= 1
        if self._left < 0:
            self.told.set()
        return self._left < 0


async def test_nothing_is_prepared_any_more_when_calls_stay_away(
    pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, slices, work = _Over(3), list[Preparing](), Preparing.work

    def counted(preparing: Preparing) -> list[tuple[str, PreparedDrafts]] | None:
        slices.append(preparing)
        return work(preparing)

    monkeypatch.setattr("draft_service.servicer.Pauses", lambda: pauses)
    monkeypatch.setattr(Preparing, "work", counted)
    async with model_server("draft", pairs["Llama"].target) as draft:
        sizes = list[PassSize]()
        drafter = RemoteDrafter(draft.channel, TIMEOUT_S)
        await drafter.propose([ProposeRow("a", 0, PROMPT, 2)])
        draft.runner.on_pass = sizes.append
        await drafter.propose([ProposeRow("a", 5, (7,), 2, prepare_count=120)])
        await pauses.told.wait()
        made = len(sizes)
        for _ in range(5):
            await draft.worker.run_between(lambda: None)
        assert len(sizes) == made > 2
        assert len(slices) <= 3


async def test_a_draft_service_that_drains_prepares_no_more_and_is_empty_once_its_sequences_are_freed(
    pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch, servicers: list[DraftServicer]
) -> None:
    work = Preparing.work
    monkeypatch.setattr(Preparing, "work", lambda preparing: work(preparing) or [])  # there is always more to do
    async with model_server("draft", pairs["Llama"].target) as draft, asyncio.timeout(TIMEOUT_S):
        drafter, told = RemoteDrafter(draft.channel, TIMEOUT_S), asyncio.Event()
        drafter.listen(lambda _: told.set())
        await drafter.propose([ProposeRow("a", 0, PROMPT, 2, prepare_count=120)])
        await told.wait()
        draft.exchanges.end_streams()
        preparing = servicers[0]._preparing
        assert preparing
        await preparing
        pool = draft.runner.cache
        assert isinstance(pool, KvPool) and pool._branch_ids
        request = draft_service_pb2.ReleaseDraftSequencesRequest(sequence_ids=["a"])
        await DraftServiceStub(draft.channel).ReleaseDraftSequences(request)
        await until_empty(draft.runner, TIMEOUT_S)
        assert not pool._sequences


async def test_the_names_of_rows_that_were_refused_are_not_kept(
    pairs: dict[str, PairOfCheckpoints], servicers: list[DraftServicer]
) -> None:
    """They were kept as long as the stream was open, whatever their length."""
    async with model_server("draft", pairs["Llama"].target) as draft:
        drafter = RemoteDrafter(draft.channel, TIMEOUT_S)
        refused = ("x" * 1000, "no rule")
        good, *others = (
            await drafter.propose(
                [
                    ProposeRow("good", 0, PROMPT, 2, prepare_count=8),
                    *(ProposeRow(one, 0, PROMPT, 2, None, prepare_count=8) for one in refused),
                ]
            )
        ).results
        assert isinstance(good, Proposal) and not any(isinstance(one, Proposal) for one in others)
        assert [*servicers[0]._streams] == ["good"]


async def test_a_bad_draft_row_fails_alone(draft: ModelServer) -> None:
    rows = [
        ProposeRow("good", 0, PROMPT, 2),
        ProposeRow("none", 0, PROMPT, 0),
        ProposeRow("huge", 0, PROMPT, 2**31 - 1),
        ProposeRow("gone", 7, PROMPT, 2),
    ]
    results = (await RemoteDrafter(draft.channel, TIMEOUT_S).propose(rows)).results
    assert isinstance(results[0], Proposal)
    assert [type(result) for result in results[1:]] == [InvalidRequest, InvalidRequest, PrefixNotCached]


async def test_rollback_truncates_and_tells_apart_unknown_and_too_long(target: ModelServer) -> None:
    await verify(target, VerifyRow("a", 0, PROMPT, ()))
    lengths = [("a", 2), ("unknown", 0), ("a", 3), ("a", -1), ("x" * 129, 0)]
    request = target_service_pb2.RollbackTargetSequencesRequest(
        sequences=[common_pb2.SequenceLength(sequence_id=one, length=length) for one, length in lengths]
    )
    response = await TargetServiceStub(target.channel).RollbackTargetSequences(request)
    first, *failed = response.results
    assert (first.cached_length, first.HasField("status")) == (2, False)
    kinds = [type(error_from_pb(result.status)) for result in failed]
    assert kinds == [SequenceNotFound, PrefixNotCached, InvalidRequest, InvalidRequest]
    assert target.runner.cache.length("a") == 2


async def test_release_frees_what_is_known_and_is_safe_to_repeat(draft: ModelServer) -> None:
    await RemoteDrafter(draft.channel, TIMEOUT_S).propose([ProposeRow("a", 0, PROMPT, 1)])
    stub = DraftServiceStub(draft.channel)
    request = draft_service_pb2.ReleaseDraftSequencesRequest(sequence_ids=["a", "unknown"])
    counts = [(await stub.ReleaseDraftSequences(request)).released_count for _ in range(2)]
    assert counts == [1, 0]
    model = await RemoteDrafter(draft.channel, TIMEOUT_S).describe(TIMEOUT_S)
    assert (model.cache.sequence_count, model.cache.used_bytes) == (0, 0)


async def test_a_request_frees_what_it_names_before_its_rows_are_served(
    draft: ModelServer, target: ModelServer
) -> None:
    drafter, verifier = RemoteDrafter(draft.channel, TIMEOUT_S), RemoteVerifier(target.channel, TIMEOUT_S)
    for name in ("a", "b"):
        drafter.owe(["a"] if name == "b" else [])
        verifier.owe(["a"] if name == "b" else [])
        await drafter.propose([ProposeRow(name, 0, PROMPT, 1)])
        await verifier.verify([VerifyRow(name, 0, PROMPT, ())])
    for service in (drafter, verifier):
        assert service.owed_count == 0
        assert (await service.describe(TIMEOUT_S)).cache.sequence_count == 1
    assert draft.runner.cache.length("b") and target.runner.cache.length("b")


def health_stub(server: ModelServer) -> Any:  # the published stubs declare no methods
    return health_pb2_grpc.HealthStub(server.channel)


async def test_a_release_is_carried_out_though_its_caller_waits_no_longer(target: ModelServer) -> None:
    """Callers wait five seconds; of a target whose passes take longer nothing was ever freed."""
    await verify(target, VerifyRow("a", 0, PROMPT, ()))
    request, stub = target_service_pb2.ReleaseTargetSequencesRequest(sequence_ids=["a"]), health_stub(target)
    async with held_up(target.worker):
        asked = TargetServiceStub(target.channel).ReleaseTargetSequences(request)
        await until(lambda: target.worker.call_count == 2)
        asked.cancel()
        for _ in range(3):  # by the same connection, so the service knows of the end then
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    await until(lambda: not target.runner.describe().cache.sequence_count)


async def test_a_model_without_tokenizer_says_so(target: ModelServer) -> None:
    with pytest.raises(TokenizerNotFound), translated_errors():
        call = TargetServiceStub(target.channel).DownloadTokenizer(target_service_pb2.DownloadTokenizerRequest())
        async for _ in call:
            pass


async def test_health_answers_while_the_model_works(target: ModelServer) -> None:
    stub = health_stub(target)
    async with held_up(target.worker):
        waiting = asyncio.ensure_future(verify(target, VerifyRow("a", 0, PROMPT, ())))
        for service in ("", "paceline.v1.TargetService"):
            response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        assert not waiting.done()
    assert isinstance((await waiting)[0], Verdict)


@pytest.mark.review
@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services(target: ModelServer, version: str) -> None:
    """review G10"""
    ask: Any = target.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {one.name async for response in call for one in response.list_services_response.service}
    assert {"paceline.v1.TargetService", "grpc.health.v1.Health"} <= names
