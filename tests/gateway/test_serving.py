"""The gateway's life, on a port of its own: who may connect, how it ends, and what clients that leave or wait cost."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from paceline.client import Client, RetryPolicy
from paceline.errors import AddressInUse, Overloaded, StartupError
from paceline.gateway.config import GatewaySettings
from paceline.gateway.errors import shutting_down
from paceline.gateway.generating import generate_all
from paceline.gateway.http import UNREAD_OPTION, Http, hang_up_on_unread
from paceline.gateway.running import Running
from paceline.gateway.serving import running_gateway
from paceline.process.instruments import Instruments, instruments
from paceline.security.certificates import end_times_s
from paceline.types import GenerationRequest, OutputPiece, TokenIds
from paceline.wire.ports import Listening, bound
from tests.certificates import Authority
from tests.coordinators import fake_server
from tests.fakes.model_services import FakeDrafter, FakeVerifier, HeldVerifier, continuation
from tests.fakes.scripted_generator import COMPLETIONS, ScriptedGenerator, pieces
from tests.scrapes import by_label, value
from tests.spans import Spans
from tests.waits import until

NOWHERE = "127.0.0.1:1"
ASKED = {"prompt": [4, 5], "max_tokens": 20, "temperature": 0, "return_token_ids": True}
REFUSED = b"POST /v1/completions HTTP/1.1\r\nhost: it\r\ncontent-length: 900000\r\n\r\n"
HASTY = RetryPolicy(retry_for_s=60, wait_while_full=False)


@asynccontextmanager
async def gateway(coordinator: str, **asked: Any) -> AsyncIterator[str]:
    settings = GatewaySettings(coordinator=coordinator, port=0, **asked)
    async with running_gateway(settings, Instruments(CollectorRegistry())) as address:
        yield address


def client(address: str, **how: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=f"{'https' if how else 'http'}://{address}", timeout=60, **how)


def trusting(ca: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(ca))


async def test_a_replaced_certificate_is_used_from_the_next_connection_on(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    own = first.issue("127.0.0.1")
    async with gateway(NOWHERE, tls_certificate=own.certificate, tls_key=own.key) as address:
        async with client(address, verify=trusting(first.ca)) as http:
            assert (await http.get("/")).status_code == 200
            first.renew(second)
            assert (await http.get("/")).status_code == 200
        async with client(address, verify=trusting(second.ca)) as http:
            assert (await http.get("/")).status_code == 200
        async with client(address, verify=trusting(first.ca)) as http:
            with pytest.raises(httpx2.ConnectError):
                await http.get("/")


async def test_it_tells_when_its_certificates_end(tmp_path: Path) -> None:
    """Nothing told of them: the alert of certificates that end was of the other services alone."""
    served, called = Authority(tmp_path / "served"), Authority(tmp_path / "called")
    early, late = datetime(2040, 1, 1, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC)
    own, shown = served.issue("127.0.0.1", not_after=early), called.issue("gateway", not_after=late)
    files: dict[str, Any] = {"tls_certificate": own.certificate, "tls_key": own.key, "coordinator_ca": called.ca}
    files |= {"coordinator_certificate": shown.certificate, "coordinator_key": shown.key}
    registry = CollectorRegistry()
    async with running_gateway(GatewaySettings(coordinator=NOWHERE, port=0, **files), Instruments(registry)):
        told = by_label(registry, "certificate_not_after_seconds", "setting")
        served.issue("127.0.0.1", not_after=late)
        renewed = by_label(registry, "certificate_not_after_seconds", "setting")
    (ca_s,) = end_times_s(called.ca.read_bytes())
    ends_s = {"coordinator_ca": ca_s, "coordinator_certificate": late.timestamp()}
    assert told == {"tls_certificate": early.timestamp(), **ends_s}
    assert renewed == {"tls_certificate": late.timestamp(), **ends_s}


async def test_its_metrics_tell_whether_a_coordinator_serves_it() -> None:
    for is_there in (True, False):
        registry = CollectorRegistry()
        async with fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry()) as server:
            settings = GatewaySettings(coordinator=server.address if is_there else NOWHERE, port=0)
            async with running_gateway(settings, Instruments(registry)):
                assert value(registry, "gateway_coordinator_available") == is_there


async def test_a_gateway_whose_certificate_has_none_of_the_allowed_names_is_not_served(tmp_path: Path) -> None:
    """It was ready, and every request failed."""
    authority = Authority(tmp_path)
    own, shown = authority.issue("127.0.0.1"), authority.issue("gateway.test")
    guard = {"tls_certificate": own.certificate, "tls_key": own.key, "tls_client_ca": authority.ca}
    files: dict[str, Any] = {"coordinator_certificate": shown.certificate, "coordinator_key": shown.key}
    for allowed, describe in (("gateway.test", True), ("gateway.test", False), ("other.test", True)):
        registry, more = CollectorRegistry(), {"tls_allowed_names": allowed, "describe": describe}
        async with fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry(), **guard, **more) as server:
            settings = GatewaySettings(coordinator=server.address, port=0, coordinator_ca=authority.ca, **files)
            async with running_gateway(settings, Instruments(registry)):
                is_let_in = allowed == "gateway.test"
                assert value(registry, "gateway_coordinator_available") == is_let_in


async def test_what_would_leave_the_machine_unguarded_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="not loopback"):
        async with gateway(NOWHERE, host="0.0.0.0"):
            pass
    words = "not on this machine.*--coordinator-ca for a gateway.*--plaintext true for both"
    with pytest.raises(StartupError, match=words):
        async with gateway("10.0.0.1:7700"):
            pass
    (tmp_path / "empty").touch()
    with pytest.raises(StartupError, match="holds no token"):
        async with gateway(NOWHERE, token_file=tmp_path / "empty"):
            pass


async def test_a_taken_port_is_named() -> None:
    async with gateway(NOWHERE) as address:
        settings = GatewaySettings(coordinator=NOWHERE, port=int(address.rpartition(":")[2]))
        with pytest.raises(AddressInUse, match="the port is taken"):
            async with running_gateway(settings, Instruments(CollectorRegistry())):
                pass


@pytest.mark.skipif(UNREAD_OPTION is None, reason="this system has no such option")
def test_the_system_ends_connections_of_clients_that_never_read() -> None:
    """What a whole answer had in the server's buffers stayed there for as long as such a client lived."""
    with bound(Listening("--port", "127.0.0.1", 0)) as listener:
        hang_up_on_unread(listener, 1e9)  # the longest that can be set
        hang_up_on_unread(listener, 90.5)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert UNREAD_OPTION and accepted.getsockopt(socket.IPPROTO_TCP, UNREAD_OPTION) == 90_500


async def test_its_metrics_may_have_a_port_of_their_own() -> None:
    settings = GatewaySettings(coordinator=NOWHERE, port=0, metrics_port=0)
    with instruments("gateway", settings) as watched:
        assert watched.metrics_url
        async with running_gateway(settings, watched), httpx2.AsyncClient() as http:
            assert "paceline_gateway_requests" in (await http.get(watched.metrics_url)).text


async def test_requests_that_run_when_it_stops_come_to_their_end() -> None:
    verifier = HeldVerifier(1)
    async with fake_server(FakeDrafter(0.7), verifier, CollectorRegistry()) as server, httpx2.AsyncClient() as http:
        stopping, begun = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def serve() -> None:
            async with gateway(server.address) as address:
                begun.set_result(address)
                await stopping.wait()

        serving = asyncio.create_task(serve())
        url = f"http://{await begun}"
        async with http.stream("POST", url + COMPLETIONS, json=ASKED | {"stream": True}, timeout=60) as response:
            lines = response.aiter_lines()
            first = await anext(lines)
            stopping.set()
            while (await http.get(f"{url}/health")).status_code == 200:
                await asyncio.sleep(0.01)
            assert not serving.done()
            verifier.open.set()
            events = [first, *[line async for line in lines if line]]
        await serving
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]] == continuation((4, 5), 20)


async def test_who_still_sends_a_body_to_a_gateway_that_stops_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection closed in the midst of the body, so that it was reset and the answer lost."""
    monkeypatch.setattr(Running, "is_draining", property(lambda _: True, lambda _, value: None), raising=False)
    async with gateway(NOWHERE) as address:
        answer = await answer_amid_a_body(address, REFUSED)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"connection: close" in answer


@pytest.mark.parametrize("ends", [(b"1.0", b"x: y"), (b"1.1", b"connection: Keep-Alive, Close")])
@pytest.mark.parametrize(
    ("path", "media_type", "status"),
    [
        (b"/v1/completions", b"application/json", b"413"),
        (b"/v1/completions", b"text/plain", b"415"),
        (b"/v1/models", b"application/json", b"405"),
        (b"/v1/embeddings", b"application/json", b"404"),
    ],
)
async def test_who_still_sends_a_body_is_told_why_it_is_refused_where_the_connection_ends_with_that(
    path: bytes, media_type: bytes, status: bytes, ends: tuple[bytes, bytes]
) -> None:
    """It was reset, as nginx's connections are unless it is told to keep them, and nginx made 502 of it."""
    version, header = ends
    lines = (b"POST %s HTTP/%s" % (path, version), b"host: it", b"content-type: " + media_type, header)
    head = b"\r\n".join((*lines, b"content-length: 900000", b"", b""))
    async with gateway(NOWHERE, max_body_bytes=1000) as address:
        answer = await answer_amid_a_body(address, head)
    assert answer.startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("expectation", [b"100-continue", b"100-Continue"])
async def test_who_expects_to_be_asked_for_a_body_is_told_at_once_that_it_is_refused(expectation: bytes) -> None:
    head = REFUSED.replace(b"host: it", b"host: it\r\nconnection: close\r\nexpect: " + expectation)
    async with gateway(NOWHERE) as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(head)
        assert (await reader.read()).startswith(b"HTTP/1.1 415")
        writer.close()


async def answer_amid_a_body(address: str, head: bytes) -> bytes:
    """Return what is answered to a head with 900,000 bytes of body that come bit by bit."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(head)
    for _ in range(9):
        await asyncio.sleep(0.01)
        writer.write(bytes(100_000))
        await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_requests_that_outlast_the_time_to_stop_are_told_so(is_streamed: bool) -> None:
    """They got 500 in plain text, or a stream that broke off."""
    verifier, asked = HeldVerifier(1), ASKED | {"stream": is_streamed}
    async with (
        fake_server(FakeDrafter(0.7), verifier, CollectorRegistry()) as server,
        httpx2.AsyncClient(timeout=60) as http,
    ):
        async with gateway(server.address, shutdown_grace_s=0.01) as address:
            asking = asyncio.create_task(http.post(f"http://{address}{COMPLETIONS}", json=asked))
            await until(lambda: verifier.calls)
        answer = await asking
        verifier.open.set()
    if is_streamed:
        assert answer.status_code == 200
        *_, event = (line for line in answer.text.splitlines() if line)
        error = json.loads(event.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 503
        error = answer.json()["error"]
    assert error["message"] == shutting_down().message


@pytest.mark.parametrize(
    ("begun", "drop"),
    [
        (b"", b""),
        (b"POST /v1/completions HTTP/1.1\r\nhost:", b"x"),
        (b"GET /health/live HTTP/1.1\r\nhost: it\r\n\r\n", b""),
        (REFUSED, b"x"),
    ],
    ids=["nothing", "a head that never ends", "nothing more", "the body of what was refused"],
)
async def test_a_connection_on_which_no_request_comes_is_ended_and_one_that_waits_for_an_answer_is_not(
    begun: bytes, drop: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the third were kept for as long as the client lived, or for ever where that had vanished."""
    connections, verifier = made_connections(monkeypatch), HeldVerifier(1)
    async with (
        fake_server(FakeDrafter(0.7), verifier, CollectorRegistry()) as server,
        gateway(server.address) as address,
        client(address) as http,
    ):
        asking = asyncio.create_task(http.post(COMPLETIONS, json=ASKED))
        await until(lambda: verifier.calls)
        assert connections[0].timeout_keep_alive_task is None
        monkeypatch.setattr(Http, "timeout_keep_alive", property(lambda _: 0.05, lambda _, value: None), raising=False)
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(begun)
        reading = asyncio.create_task(reader.read())
        while not reading.done():  # what comes does not prolong it
            writer.write(drop)
            await asyncio.sleep(0.01)
        with suppress(ConnectionError):
            await reading
        writer.close()
        verifier.open.set()
        assert (await asking).status_code == 200


def made_connections(monkeypatch: pytest.MonkeyPatch) -> list[Http]:
    """Return the gateway's connections, which are added as they are made."""
    connections: list[Http] = []
    made = Http.connection_made

    def noted(connection: Http, transport: asyncio.Transport) -> None:
        connections.append(connection)
        made(connection, transport)

    monkeypatch.setattr(Http, "connection_made", noted)
    return connections


async def test_a_connection_is_kept_for_longer_than_balancers_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them sent at the moment when it was closed here was lost: that was so after 5 s."""
    kept_s: list[float] = []
    complete = Http.on_response_complete

    def noted(connection: Http) -> None:
        complete(connection)
        assert connection.timeout_keep_alive_task
        kept_s.append(connection.timeout_keep_alive_task.when() - connection.loop.time())

    monkeypatch.setattr(Http, "on_response_complete", noted)
    async with gateway(NOWHERE) as address, client(address) as http:
        assert (await http.get("/health/live")).status_code == 200
    assert kept_s[0] > 600


@pytest.mark.parametrize("more", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_a_client_that_leaves_before_its_answer_ends_its_request(more: bytes) -> None:
    """One that had sent more behind the request was not seen to leave."""
    verifier, registry = HeldVerifier(0), CollectorRegistry()
    async with (
        fake_server(FakeDrafter(0.7), verifier, registry) as server,
        gateway(server.address) as address,
        Client(server.address) as grpc,
    ):
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(ASKED).encode()
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()
        while not (await grpc.describe()).live_sequence_count:
            await asyncio.sleep(0.01)
        writer.write(more)
        writer.close()
        async with client(address) as http:
            while 'status="499"} 1.0' not in (await http.get("/metrics")).text:
                await asyncio.sleep(0.01)
        await until(lambda: value(registry, "requests_total", code="CANCELLED") == 1)
        verifier.open.set()
        while (await grpc.describe()).live_sequence_count:
            await asyncio.sleep(0.01)
    assert len(verifier.calls) == 1, "only the round that it was in ends"


async def test_requests_that_come_before_the_first_is_answered_are_answered_in_turn() -> None:
    """However much they are: what is read ahead has a limit."""
    count, request = 400, b"GET /health/live HTTP/1.1\r\nhost: it\r\nx: " + b"x" * 999 + b"\r\n\r\n"
    async with gateway(NOWHERE) as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(request * (count - 1) + request.replace(b"x: x", b"connection: close\r\nx: x"))
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == count
        writer.close()


async def test_full_coordinators_are_told_at_once_and_one_with_room_is_asked() -> None:
    full, roomy = HeldVerifier(0), FakeVerifier()
    registries = (CollectorRegistry(), CollectorRegistry())
    request = GenerationRequest(TokenIds((4, 5)), 20)
    async with (
        fake_server(FakeDrafter(0.7), full, registries[0], queue_limit=1) as one,
        fake_server(FakeDrafter(0.7), roomy, registries[1]) as other,
        Client(one.address) as patient,
        Client(one.address, HASTY) as hasty,
        Client(f"{one.address},{other.address}", HASTY) as with_another,
        gateway(one.address) as address,
        client(address) as http,
    ):
        crowd = []
        for live, waiting in ((1, 0), (1, 1)):
            crowd.append(asyncio.create_task(patient.complete(request)))
            while True:
                now = await patient.describe()
                if (now.live_sequence_count, now.waiting_sequence_count) == (live, waiting):
                    break
                await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await hasty.complete(request)
        answer = await http.post(COMPLETIONS, json=ASKED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert answer.headers["retry-after"].isdecimal()
        for _ in range(4):
            assert (await with_another.complete(request)).token_ids == continuation((4, 5), 20)
        full.open.set()
        for task in crowd:
            assert (await task).token_ids == continuation((4, 5), 20)


async def test_a_callers_trace_reaches_a_coordinator_behind_a_gateway_that_traces_nothing() -> None:
    spans, trace_id, span_id = Spans(), f"{7:032x}", f"{8:016x}"
    async with (
        fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry(), tracer=spans.tracer) as server,
        gateway(server.address) as address,
        client(address) as http,
    ):
        for stream in (False, True):
            headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
            assert (await http.post(COMPLETIONS, json=ASKED | {"stream": stream}, headers=headers)).status_code == 200
        await until(lambda: len(spans("generate")) == 2)
    assert [(one.trace_id, one.parent_id) for one in spans("generate")] == [(trace_id, span_id)] * 2


async def test_no_more_is_read_than_was_written() -> None:
    """A reader that waits stops the stream behind it, wherever its output comes from."""
    generator, reads_on = ScriptedGenerator(pieces(*"abcdef")), asyncio.Event()
    taken: list[str] = []

    async def deliver(_: int, piece: OutputPiece) -> None:
        taken.append(piece.tokens[0].text)
        if len(taken) == 2:
            await reads_on.wait()

    generating = asyncio.create_task(
        generate_all(generator, [GenerationRequest(TokenIds((4,)))], deliver, lambda *_: None, 60)
    )
    while len(taken) < 2:
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert taken == ["a", "b"]
    reads_on.set()
    await generating
    assert taken == [*"abcdef"]
