"""Certificates over real gRPC: callers admitted, callers refused, and replaced files."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from paceline.errors import PeerUnavailable, PermissionDenied, StartupError
from paceline.observe.tracing import traced_channel
from paceline.security.access import allowed_names, caller_names
from paceline.security.certificates import watch_certificates
from paceline.security.channels import LOCAL, ChannelSecurity, channel_security
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer, DraftServiceStub
from paceline.wire import ServerOptions, open_channel, running_server, translated_errors
from paceline.wire.reopening import ReopeningChannel
from tests.certificates import Authority, CertificateFiles, watched
from tests.fakes.draft_servers import draft_server
from tests.spans import Spans

TIMEOUT_S = 30.0


class Servicer(DraftServiceServicer):
    """Remembers callers; a release waits until a test lets it go on."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.certificate = b""
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()

    async def DescribeDraftModel(
        self, request: pb.DescribeDraftModelRequest, context: Any
    ) -> pb.DescribeDraftModelResponse:
        self._remember(context)
        return pb.DescribeDraftModelResponse()

    async def ProposeTokens(
        self, requests: AsyncIterator[pb.ProposeTokensRequest], context: Any
    ) -> AsyncIterator[pb.ProposeTokensResponse]:
        async for _ in requests:
            self._remember(context)
            yield pb.ProposeTokensResponse()

    def _remember(self, context: Any) -> None:
        self.names = caller_names(context)
        (self.certificate,) = context.auth_context().get("x509_pem_cert", [b""])

    async def ReleaseDraftSequences(
        self, request: pb.ReleaseDraftSequencesRequest, context: Any
    ) -> pb.ReleaseDraftSequencesResponse:
        self.entered.set()
        await self.go_on.wait()
        return pb.ReleaseDraftSequencesResponse(released_count=7)


def serving(options: ServerOptions) -> AbstractAsyncContextManager[tuple[Servicer, str]]:
    return draft_server(Servicer(), options=options)  # type: ignore[abstract]


def mutual(authority: Authority) -> ServerOptions:
    return watched(authority.issue("127.0.0.1"), authority.ca)


def showing(authority: Authority, own: CertificateFiles | None) -> ChannelSecurity:
    if own is None:
        return channel_security(ca=authority.ca)
    return channel_security(ca=authority.ca, certificate=own.certificate, key=own.key)


async def describe(channel: grpc.aio.Channel) -> None:
    with translated_errors():
        await DraftServiceStub(channel).DescribeDraftModel(pb.DescribeDraftModelRequest(), timeout=TIMEOUT_S)


async def test_mutual_tls_tells_the_server_who_calls(authority: Authority) -> None:
    own = authority.issue("coordinator.test", "10.1.2.3")
    async with (
        serving(mutual(authority)) as (servicer, address),
        open_channel(address, security=showing(authority, own)) as channel,
    ):
        await describe(channel)
    assert servicer.names == {"coordinator.test", "10.1.2.3"}


STRANGERS: dict[str, Callable[[Authority, Authority], ChannelSecurity]] = {
    "no certificate": lambda ours, theirs: showing(ours, None),
    "another authority's certificate": lambda ours, theirs: showing(ours, theirs.issue("coordinator.test")),
    "plaintext": lambda ours, theirs: LOCAL,
    "who trusts another authority": lambda ours, theirs: showing(theirs, ours.issue("coordinator.test")),
}


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_strangers_get_no_connection(authority: Authority, tmp_path: Path, stranger: str) -> None:
    security = STRANGERS[stranger](authority, Authority(tmp_path / "other"))
    async with serving(mutual(authority)) as (servicer, address), open_channel(address, security=security) as channel:
        with pytest.raises(PeerUnavailable):
            await describe(channel)
    assert not servicer.certificate


async def test_a_certificate_of_another_name_than_the_address_is_refused_unless_that_name_is_expected(
    authority: Authority,
) -> None:
    security = showing(authority, None)
    async with serving(watched(authority.issue("target.test"))) as (_, address):
        async with open_channel(address, security=security) as channel:
            with pytest.raises(PeerUnavailable):
                await describe(channel)
        async with open_channel(address, security=replace(security, authority="target.test:7702")) as channel:
            await describe(channel)


async def test_only_allowed_names_may_call_but_health_checks_are_open(authority: Authority) -> None:
    options = ServerOptions(mutual(authority).certificates, (allowed_names({"coordinator.test", "gateway.test"}),))
    async with serving(options) as (_, address):
        async with open_channel(address, security=showing(authority, authority.issue("gateway.test"))) as channel:
            await describe(channel)
        other = showing(authority, authority.issue("other.test"))
        async with open_channel(address, security=other) as channel:
            with pytest.raises(PermissionDenied, match="--tls-allowed-names"):
                await describe(channel)
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_probes_get_health_in_plaintext_on_a_port_of_its_own_and_nothing_else(authority: Authority) -> None:
    options = ServerOptions(mutual(authority).certificates, health_port=0)
    async with running_server("127.0.0.1", 0, ["a.Service"], lambda server: None, grace_s=0, options=options) as server:
        assert server.health_address
        async with open_channel(server.health_address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for serving_now in (False, True):
                server.set_serving(serving_now)
                for name in ("", "a.Service"):
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
                    assert answer.status == (
                        health_pb2.HealthCheckResponse.SERVING
                        if serving_now
                        else health_pb2.HealthCheckResponse.NOT_SERVING
                    )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await DraftServiceStub(channel).DescribeDraftModel(pb.DescribeDraftModelRequest(), timeout=TIMEOUT_S)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def served_leaf(address: str) -> bytes:
    """Return the certificate shown to a new connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    leaf: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return leaf


def leaf_in(files: CertificateFiles) -> bytes:
    return ssl.PEM_cert_to_DER_cert(
        files.certificate.read_text().split("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n"
    )


async def test_a_server_shows_its_new_certificate_at_the_next_handshake(authority: Authority) -> None:
    files = authority.issue("127.0.0.1")
    async with (
        serving(watched(files)) as (_, address),
        open_channel(address, security=showing(authority, None)) as channel,
    ):
        await describe(channel)
        before = leaf_in(files)
        assert await served_leaf(address) == before
        authority.issue("127.0.0.1")
        assert await served_leaf(address) == leaf_in(files) != before
        await describe(channel)


async def test_while_a_key_is_not_its_certificates_the_old_pair_is_served(authority: Authority) -> None:
    files = authority.issue("127.0.0.1")
    async with serving(watched(files)) as (_, address):
        before, key = leaf_in(files), files.key.read_bytes()
        authority.issue("127.0.0.1")
        new_key = files.key.read_bytes()
        files.key.write_bytes(key)
        with capture_logs() as lines:
            assert await served_leaf(address) == before
            assert await served_leaf(address) == before
        (line,) = lines
        assert "going on with what they held" in line["event"]
        files.key.write_bytes(new_key)
        assert await served_leaf(address) == leaf_in(files) != before


@pytest.mark.parametrize("traced", [False, True])
async def test_a_channel_opens_anew_when_its_certificate_is_replaced_and_calls_in_flight_end(
    authority: Authority, traced: bool
) -> None:
    tracer = Spans().tracer if traced else None
    own = authority.issue("coordinator.test")
    async with (
        serving(mutual(authority)) as (servicer, address),
        open_channel(address, security=showing(authority, own), wrap=traced_channel(tracer)) as channel,
    ):
        await describe(channel)
        before = servicer.certificate
        release = asyncio.ensure_future(
            DraftServiceStub(channel).ReleaseDraftSequences(pb.ReleaseDraftSequencesRequest(), timeout=TIMEOUT_S)
        )
        await servicer.entered.wait()
        authority.issue("coordinator.test")
        await asyncio.gather(*(describe(channel) for _ in range(20)))
        assert servicer.certificate.strip() in own.certificate.read_bytes()
        assert servicer.certificate != before
        servicer.go_on.set()
        assert (await release).released_count == 7


async def test_a_replaced_channel_is_closed_after_its_last_call() -> None:
    opened: list[grpc.aio.Channel] = []
    opening: list[object] = [object()]
    async with serving(ServerOptions()) as (servicer, address):

        def open_one(_: object) -> grpc.aio.Channel:
            opened.append(open_channel(address))
            return opened[-1]

        async with ReopeningChannel(lambda: opening[0], open_one) as channel:
            release = DraftServiceStub(channel).ReleaseDraftSequences(pb.ReleaseDraftSequencesRequest())
            await servicer.entered.wait()
            opening[0] = object()
            await describe(channel)
            old, new = opened
            assert old.get_state() is grpc.ChannelConnectivity.READY
            servicer.go_on.set()
            await release
            while old.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
                await asyncio.sleep(0)
            assert new.get_state() is grpc.ChannelConnectivity.READY
        assert new.get_state() is grpc.ChannelConnectivity.SHUTDOWN


@pytest.mark.parametrize("wrong", ["certificate", "key", "ca"])
def test_a_file_that_is_no_pem_is_named_with_its_flag(authority: Authority, wrong: str) -> None:
    files = authority.issue("127.0.0.1")
    paths = {"certificate": files.certificate, "key": files.key, "ca": authority.ca}
    paths[wrong].write_text("-----BEGIN SECRET")
    with pytest.raises(StartupError, match=f"--flags: .*{paths[wrong].name}.* cannot be used") as refused:
        watch_certificates("--flags", **paths)
    assert "SECRET" not in refused.value.message


def test_files_that_are_replaced_by_the_same_are_the_same(authority: Authority) -> None:
    certificates = watch_certificates("--models-ca", None, None, authority.ca)
    before = certificates.value()
    authority.trust(authority)
    assert certificates.value() is before
    authority.trust(authority, authority)
    assert certificates.value() is not before


def test_a_file_that_is_missing_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--models-ca: .*nowhere cannot be used"):
        watch_certificates("--models-ca", None, None, tmp_path / "nowhere")
