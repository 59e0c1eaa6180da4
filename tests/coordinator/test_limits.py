"""Limits on a caller's requests; a refusal states the limit."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from coordinator.door.admission import Admission
from coordinator.door.limits import RequestLimits
from coordinator.replicas.clients import RemoteDrafter, RemoteVerifier
from coordinator.serving import running_coordinator
from paceline.checks import MAX_PROPOSED_COUNT
from paceline.client import Client
from paceline.errors import InvalidRequest, MessageTooLarge
from paceline.observe.metrics import new_registry
from paceline.process.instruments import Instruments
from paceline.security.limits import LEAST_MESSAGE_BYTES
from paceline.types import GenerationRequest, Proposal, ProposeRow, Text, TokenIds, TokenizerFiles, VerifyRow
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer, DraftServiceStub
from paceline.wire import ServerOptions, open_channel
from tests.clusters import model_server
from tests.conftest import PairOfCheckpoints
from tests.coordinators import SERVED, fake_server, settings_of
from tests.fakes.draft_servers import draft_server
from tests.fakes.model_services import FakeDrafter, FakeVerifier, continuation

TIMEOUT_S = 30.0
REQUEST = GenerationRequest(TokenIds((5, 6, 7)))


def admission(**limits: Any) -> Admission:
    return Admission(SERVED, default_max_new_tokens=40, limits=RequestLimits(**limits))


@pytest.mark.parametrize(
    ("limits", "at_limit", "beyond", "field", "words"),
    [
        ({"max_prompt_tokens": 3}, REQUEST, replace(REQUEST, prompt=TokenIds((5,) * 4)), "prompt", "at most 3"),
        (
            {"max_output_tokens": 10},
            replace(REQUEST, max_new_tokens=10),
            replace(REQUEST, max_new_tokens=11),
            "max_new_tokens",
            "at most 10",
        ),
        (
            {"max_completions": 2},
            replace(REQUEST, completion_count=2),
            replace(REQUEST, completion_count=3),
            "completion_count",
            "1 to 2",
        ),
        (
            {"max_together": 5},
            replace(REQUEST, completion_count=5),
            replace(REQUEST, completion_count=6),
            "completion_count",
            "completion_count is 6; .* room for 5 outputs",
        ),
    ],
)
def test_a_request_beyond_a_limit_is_told_field_and_limit(
    limits: dict[str, int], at_limit: GenerationRequest, beyond: GenerationRequest, field: str, words: str
) -> None:
    assert admission(**limits).admit(at_limit)
    with pytest.raises(InvalidRequest, match=words) as refused:
        admission(**limits).admit(beyond)
    assert refused.value.field == field


def test_the_output_limit_is_the_default_where_that_is_more() -> None:
    for limit, tokens in ((10, 10), (100, 40), (None, 40)):
        (generation,) = admission(max_output_tokens=limit).admit(REQUEST).generations
        assert generation.output.remaining_count == tokens


def test_sequence_ids_cannot_be_guessed_from_one_another() -> None:
    ids = [generation.sequence_id for _ in range(100) for generation in admission().admit(REQUEST).generations]
    assert all(len(bytes.fromhex(one)) == 16 for one in ids)
    assert all(len({one[place : place + 4] for one in ids}) > 90 for place in range(0, 32, 4))


async def test_a_message_beyond_the_limit_is_refused_at_once_and_not_repeated() -> None:
    async with (
        fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry(), max_message_bytes=1000) as server,
        Client(server.address) as client,
    ):
        with pytest.raises(MessageTooLarge, match="1000"):
            await client.complete(replace(REQUEST, prompt=TokenIds((5,) * 2000)))
        assert (await client.complete(REQUEST)).token_ids == continuation((5, 6, 7), 40)


async def test_the_limit_on_clients_messages_bounds_none_of_the_model_services() -> None:
    """A coordinator whose clients were kept to less than a piece of the tokenizer did not start."""
    limit = 4096
    async with model_server("target", "builtin:target") as target:
        assert target.runner.model.tokenizer
        assert len(target.runner.model.tokenizer.tokenizer_json) > limit
        settings = settings_of(draft="none", target=target.address, max_message_bytes=limit)
        async with (
            running_coordinator(settings, Instruments(new_registry("coordinator"), None)) as server,
            Client(server.address) as client,
        ):
            request = GenerationRequest(Text("one two three"), max_new_tokens=4)
            assert len((await client.complete(request)).token_ids) == 4
            with pytest.raises(MessageTooLarge, match=str(limit)):
                await client.complete(replace(request, prompt=Text("x" * limit)))


async def test_a_target_kept_to_the_least_message_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServerOptions(max_message_bytes=LEAST_MESSAGE_BYTES)
    files = TokenizerFiles("é" * LEAST_MESSAGE_BYTES, "", "{}")
    async with model_server("target", "builtin:target", server_options=options) as target:
        monkeypatch.setattr(target.runner, "model", replace(target.runner.model, tokenizer=files))
        assert await RemoteVerifier(target.channel, TIMEOUT_S).download_tokenizer() == files


async def test_a_call_with_too_many_rows_is_told_the_limit(pairs: dict[str, PairOfCheckpoints]) -> None:
    async with model_server("target", pairs["Llama"].target) as target:
        verifier = RemoteVerifier(target.channel, TIMEOUT_S)
        assert (await verifier.describe(TIMEOUT_S)).max_rows == 256
        with pytest.raises(InvalidRequest, match=r"rows has 257 entries; at most 256 .*--max-rows"):
            await verifier.verify([VerifyRow(str(n), 0, (5,), ()) for n in range(257)])
    async with model_server("draft", pairs["Llama"].draft) as draft:
        drafter = RemoteDrafter(draft.channel, TIMEOUT_S)
        assert (await drafter.describe(TIMEOUT_S)).max_rows == 256
        with pytest.raises(InvalidRequest, match=r"rows has 257 entries; at most 256 .*--max-rows"):
            await drafter.propose([ProposeRow(str(n), 0, (5,), 1) for n in range(257)])


@pytest.mark.review
async def test_a_row_with_too_many_drafts_fails_alone_and_is_told_the_limit(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    """Review B10: 300 drafts were accepted and recorded as one program."""
    counts = (0, 1, MAX_PROPOSED_COUNT, 300)
    async with model_server("draft", pairs["Llama"].draft) as draft:
        asked = [ProposeRow(str(count), 0, (5,), count) for count in counts]
        none, *made, many = (await RemoteDrafter(draft.channel, TIMEOUT_S).propose(asked)).results
    for refused, count in ((none, 0), (many, 300)):
        assert isinstance(refused, InvalidRequest)
        assert refused.field == "draft_count"
        assert f"draft_count is {count}; ask for 1 to {MAX_PROPOSED_COUNT}" in refused.message
    assert [len(one.draft_token_ids) for one in made if isinstance(one, Proposal)] == [1, MAX_PROPOSED_COUNT]


class Held(DraftServiceServicer):
    """Holds rollbacks until a test lets them go on; releases pass."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[None] = asyncio.Queue()
        self.go_on = asyncio.Semaphore(0)

    async def RollbackDraftSequences(
        self, request: pb.RollbackDraftSequencesRequest, context: Any
    ) -> pb.RollbackDraftSequencesResponse:
        self.calls.put_nowait(None)
        await self.go_on.acquire()
        return pb.RollbackDraftSequencesResponse()

    async def ReleaseDraftSequences(
        self, request: pb.ReleaseDraftSequencesRequest, context: Any
    ) -> pb.ReleaseDraftSequencesResponse:
        return pb.ReleaseDraftSequencesResponse()


@pytest.fixture
async def held() -> AsyncIterator[tuple[Held, str]]:
    async with draft_server(Held(), options=ServerOptions(max_concurrent_streams=2)) as served:  # type: ignore[abstract]
        yield served


async def test_calls_beyond_the_streams_of_a_connection_wait_at_the_caller(held: tuple[Held, str]) -> None:
    servicer, address = held
    # Channels with equal options would share a connection.
    async with open_channel(address) as channel, open_channel(address, max_message_bytes=1 << 20) as other:
        stub = DraftServiceStub(channel)
        calls = [
            asyncio.ensure_future(stub.RollbackDraftSequences(pb.RollbackDraftSequencesRequest(), timeout=TIMEOUT_S))
            for _ in range(3)
        ]
        for _ in range(2):
            await servicer.calls.get()
        for _ in range(10):  # time enough for the third call to arrive
            await DraftServiceStub(other).ReleaseDraftSequences(pb.ReleaseDraftSequencesRequest(), timeout=TIMEOUT_S)
        assert servicer.calls.empty()
        servicer.go_on.release()
        await servicer.calls.get()
        servicer.go_on.release()
        servicer.go_on.release()
        await asyncio.gather(*calls)
