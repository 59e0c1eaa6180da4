"""Peers of other versions: compatible pairs, and errors for the others."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from coordinator.replicas.clients import RemoteDrafter, RemoteVerifier
from coordinator.replicas.replica import Replica
from paceline.codec.models import model_to_pb
from paceline.codec.rounds import propose_rows_to_pb, verify_rows_to_pb
from paceline.codec.versions import EARLIEST_SERVICE, RESPONSE_FORMATS, VERSION, check_service_versions
from paceline.errors import IncompatiblePair, InvalidRequest, PeerUnavailable, StartupError
from paceline.types import (
    GREEDY,
    ChoiceRule,
    GenerationRequest,
    Proposal,
    ProposeRow,
    ReplicaState,
    ResponseFormat,
    SamplingParameters,
    TokenIds,
    Verdict,
    VerifyRow,
)
from paceline.v1 import common_pb2
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from paceline.wire import Exchange, open_channel, translated_errors
from tests.clusters import cluster, model_server
from tests.conftest import PairOfCheckpoints
from tests.coordinators import fits
from tests.fakes.draft_servers import draft_server
from tests.fakes.model_services import describe
from tests.fakes.other_wires import OtherWire, released_wire, without

pytestmark = pytest.mark.review
TIMEOUT_S = 60.0
NONE = common_pb2.WireVersions()


@dataclass(eq=False)
class Versioned(DraftServiceServicer):
    """A draft service of a given version; it knows no token."""

    wire: common_pb2.WireVersions = field(default_factory=lambda: NONE)
    row_counts: list[int] = field(default_factory=list)

    async def DescribeDraftModel(
        self, request: pb.DescribeDraftModelRequest, context: Any
    ) -> pb.DescribeDraftModelResponse:
        return pb.DescribeDraftModelResponse(model=model_to_pb(describe("draft")), wire=self.wire)

    async def ProposeTokens(
        self, requests: AsyncIterator[pb.ProposeTokensRequest], context: Any
    ) -> AsyncIterator[pb.ProposeTokensResponse]:
        async for request in requests:
            self.row_counts.append(len(request.rows))
            results = [pb.ProposeTokensResult(sequence_id=row.sequence_id) for row in request.rows]
            yield pb.ProposeTokensResponse(results=results, wire_version=self.wire.latest)


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (NONE, f"version 0 of the wire, and this coordinator {VERSION}.*; upgrade the model services before"),
        (
            common_pb2.WireVersions(latest=VERSION + 2, earliest=VERSION + 1),
            f"versions {VERSION + 1} to {VERSION + 2} of the wire, and this coordinator {VERSION}; upgrade the coord",
        ),
    ],
)
async def test_a_service_that_a_coordinator_cannot_work_with_is_refused_with_the_remedy(
    wire: common_pb2.WireVersions, words: str
) -> None:
    """review D10, C5: a service that knows no rules told once would decode greedily."""
    servicer: Callable[..., Any] = Versioned
    async with draft_server(servicer(wire)) as (_, address):
        replica = Replica("draft:1", RemoteDrafter(open_channel(address), TIMEOUT_S), fits)
        replica.remote.is_serving = serves  # type: ignore[method-assign]
        await replica.look()
        assert replica.state is ReplicaState.REFUSED
        assert isinstance(replica.error, IncompatiblePair)
        assert replica.error.message.startswith("draft:1: a draft service speaks ")
        with pytest.raises(IncompatiblePair, match=words):
            await replica.remote.describe(TIMEOUT_S)
        await replica.remote.close()


async def serves(timeout_s: float) -> bool:
    return True


@pytest.mark.parametrize("latest", [EARLIEST_SERVICE, VERSION, VERSION + 5])
def test_only_what_is_incompatible_is_refused(latest: int) -> None:
    """review D10"""
    check_service_versions(common_pb2.WireVersions(latest=latest, earliest=0), "a target service")
    check_service_versions(common_pb2.WireVersions(latest=latest, earliest=VERSION), "a target service")


async def test_no_answer_is_taken_of_an_older_service_that_came_up_where_another_was() -> None:
    """review C5: its answers reveal it between two descriptions."""
    servicer: Callable[..., Any] = Versioned
    async with draft_server(servicer(common_pb2.WireVersions(latest=VERSION))) as (older, address):
        remote = RemoteDrafter(open_channel(address), TIMEOUT_S)
        await remote.describe(TIMEOUT_S)
        await remote.propose([ProposeRow("a", 0, (5,), 1)])
        older.wire = NONE
        with pytest.raises(PeerUnavailable, match=r"speaks version 0 of the wire answers where another was.*upgrade"):
            await remote.propose([ProposeRow("a", 0, (5,), 1)])
        await remote.close()


FORMATTED = ChoiceRule(end_token_ids=(7,), response_format=ResponseFormat(regex="a"))


def test_a_request_is_of_the_lowest_version_that_its_rows_need() -> None:
    plain, told, formatted = (
        ProposeRow(name, 0, (5,), 1, rule) for name, rule in zip("abc", (GREEDY, None, FORMATTED), strict=True)
    )
    assert propose_rows_to_pb([plain, told]).context.wire_version == EARLIEST_SERVICE
    assert propose_rows_to_pb([plain, formatted]).context.wire_version == RESPONSE_FORMATS
    row = VerifyRow("a", 0, (5,), (), FORMATTED)
    assert verify_rows_to_pb([row]).context.wire_version == RESPONSE_FORMATS


async def test_a_service_that_knows_no_formats_gets_no_row_with_one_and_serves_the_others() -> None:
    """It would pass the format over; a request of a version that it does not read would fail all rows."""
    servicer: Callable[..., Any] = Versioned
    async with draft_server(servicer(common_pb2.WireVersions(latest=RESPONSE_FORMATS - 1))) as (older, address):
        remote = RemoteDrafter(open_channel(address), TIMEOUT_S)
        await remote.describe(TIMEOUT_S)
        rows = [
            ProposeRow("a", 0, (5,), 1, FORMATTED),
            ProposeRow("b", 0, (5,), 1),
            ProposeRow("c", 0, (5,), 1, FORMATTED),
        ]
        proposals = await remote.propose(rows)
        assert proposals.results[1] == Proposal((), 0)
        for refusal in (*proposals.results[::2], *(await remote.propose(rows[:1])).results):
            assert isinstance(refusal, InvalidRequest)
            assert (
                refusal.message
                == "response_format needs version 2 of the wire, and a draft service speaks 1; upgrade it"
            )
        assert older.row_counts == [1]
        older.wire = common_pb2.WireVersions(latest=RESPONSE_FORMATS)
        await remote.describe(TIMEOUT_S)
        assert (await remote.propose(rows)).results == [Proposal((), 0)] * 3
        await remote.close()


async def test_a_target_that_knows_no_formats_fails_the_request_that_has_one_alone(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    async with model_server("target", pairs["Llama"].target) as server:
        remote = RemoteVerifier(server.channel, TIMEOUT_S)
        await remote.describe(TIMEOUT_S)
        remote._latest_version = RESPONSE_FORMATS - 1
        rows = [VerifyRow("a", 0, (20, 21), (), FORMATTED), VerifyRow("b", 0, (20, 21), ())]
        refusal, verdict = (await remote.verify(rows)).results
        assert isinstance(refusal, InvalidRequest)
        assert isinstance(verdict, Verdict)


async def test_a_service_refuses_a_request_of_a_newer_form_and_says_its_own_versions(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    """review D10"""
    async with model_server("target", pairs["Llama"].target) as server:
        await RemoteVerifier(server.channel, TIMEOUT_S).describe(TIMEOUT_S)
        request = verify_rows_to_pb([VerifyRow("a", 0, (20, 21), ())])
        assert request.context.wire_version == EARLIEST_SERVICE  # the lowest that its row needs
        request.context.wire_version = VERSION + 1
        exchange = Exchange(TargetServiceStub(server.channel).VerifyTokens)
        words = f"version {VERSION + 1} of the wire, and this service reads 0 to {VERSION}; upgrade the model services"
        with pytest.raises(InvalidRequest, match=words), translated_errors():
            await exchange.ask(request, TIMEOUT_S)
        assert server.runner.cache.sequence_count == 0


PROMPT = TokenIds(tuple(range(20, 60)))
GAINED = ("identity", "base_hash", "freed_bytes", "weights_digest", "configuration_digest", "revision", "kernels")
"""Fields that the wire gained within version 1: a service that knows none of them does its work."""


@pytest.mark.parametrize(
    ("wire", "must_lose"),
    [(released_wire(), False), (without(released_wire(), *GAINED), True)],
    ids=["the last release", "an early one of version 1"],
)
async def test_the_services_of_another_release_with_one_wire_serve_this_coordinator(
    wire: FileDescriptorSet, must_lose: bool, pairs: dict[str, PairOfCheckpoints]
) -> None:
    """review D10: the tokens are those that services of this release choose, and drafts are accepted.

    Until the first release its wire is today's, so the first case loses nothing yet, and the second one shows more.
    """
    pair = pairs["Llama"]
    requests = [
        GenerationRequest(PROMPT, 24, sampling=SamplingParameters(temperature=temperature), seed=3)
        for temperature in (0.0, 1.0)
    ]
    async with cluster(pair.target, pair.draft) as present:
        expected = [(await present.client.complete(one)).token_ids for one in requests]
    other = OtherWire(wire)
    async with cluster(pair.target, pair.draft, interceptors=[other]) as past:
        completions = [await past.client.complete(one) for one in requests]
    assert [one.token_ids for one in completions] == expected
    assert all(one.finish.usage.accepted_count for one in completions)
    assert other.lost_count or not must_lose


async def test_a_coordinator_refuses_services_of_before_there_were_versions(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    """review D10"""
    pair = pairs["Llama"]
    other = OtherWire(without(released_wire(), "wire", "wire_version"))
    words = rf"target service speaks version 0 of the wire, and this coordinator {VERSION}.*upgrade the model services"
    with pytest.raises(StartupError, match=words):
        async with cluster(pair.target, pair.draft, interceptors=[other]):
            pass
