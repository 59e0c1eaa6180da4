"""The gateway's life: connect, serve, drain."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn

from paceline.client import Client
from paceline.gateway.app import make_app
from paceline.gateway.config import GatewaySettings
from paceline.gateway.endpoint import Gateway
from paceline.gateway.http import REST_S, Http, hang_up_on_unread
from paceline.gateway.metrics import GatewayMetrics
from paceline.gateway.models import ServedModel
from paceline.gateway.page import Page
from paceline.gateway.reading import BODY_TIMEOUT_S, MOST_BODIES_BYTES, BodyRoom
from paceline.gateway.running import Running
from paceline.gateway.tls import Served, server_context, watch_served
from paceline.observe.metrics import CertificateCollector
from paceline.process.instruments import Instruments, instruments
from paceline.process.service import announce, freeze_heap
from paceline.security.files import WatchedFiles
from paceline.security.plaintext import check_listening
from paceline.security.tokens import KnownTokens
from paceline.wire import termination
from paceline.wire.ports import Listening, bound, host_port

CUT_OFF_S = 1
"""Seconds that requests have to end once their time is up and they are cancelled."""


async def serve(settings: GatewaySettings) -> None:
    with instruments("gateway", settings) as watched:
        async with running_gateway(settings, watched) as address:
            freeze_heap()
            announce("paceline.gateway", address, watched.metrics_url)
            await termination(stop_with_stdin=settings.stop_with_stdin)


@asynccontextmanager
async def running_gateway(settings: GatewaySettings, watched: Instruments) -> AsyncIterator[str]:
    """Serve while the block runs; yield HOST:PORT. On leaving, running requests get `shutdown_grace_s` to end.

    Raise StartupError when a setting is wrong or the port is taken.
    """
    check_listening(settings.host, encrypted=settings.tls_certificate is not None, plaintext=settings.plaintext)
    tokens = KnownTokens(settings.token_file) if settings.token_file else None
    served, security = _served(settings), settings.coordinator_security()
    watched.registry.register(CertificateCollector("gateway", served, coordinators=security.certificates))
    retries, tracer = settings.retries, watched.tracer
    async with Client(settings.coordinator, retries, tracer, security, shares_stream=True) as client:
        model = ServedModel(client, settings.model_names)
        await model.look()
        gateway = Gateway(
            client,
            model,
            Running(settings.max_requests),
            BodyRoom(max(MOST_BODIES_BYTES, settings.max_body_bytes)),
            GatewayMetrics(watched.registry, lambda: model.is_served),
            watched.tracer,
            settings.tool_format,
            settings.max_body_bytes,
            settings.request_timeout_s,
        )
        app = make_app(gateway, watched.registry, Page(), tokens, settings.cors_origins)
        watching = asyncio.create_task(model.watch())
        try:
            async with listening(settings, app, served) as address:
                try:
                    yield address
                finally:
                    await gateway.running.drain(settings.shutdown_grace_s)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


def _served(settings: GatewaySettings) -> WatchedFiles[Served] | None:
    """Return what is served with; None for plaintext. Raise StartupError when a file is wrong."""
    if settings.tls_certificate and settings.tls_key:
        return watch_served(settings.tls_certificate, settings.tls_key)
    return None


@asynccontextmanager
async def listening(
    settings: GatewaySettings, app: object, served: WatchedFiles[Served] | None = None
) -> AsyncIterator[str]:
    """Let clients call while the block runs; yield HOST:PORT."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=Http,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=REST_S,
        timeout_graceful_shutdown=CUT_OFF_S,
    )
    config.load()
    if served:
        config.ssl = server_context(served)
    with bound(Listening("--port", settings.host, settings.port)) as listener:
        hang_up_on_unread(listener, BODY_TIMEOUT_S + settings.request_timeout_s)
        server = _Server(config)
        serving, begun = asyncio.create_task(server.serve([listener])), asyncio.create_task(server.listening.wait())
        try:
            await asyncio.wait({serving, begun}, return_when=asyncio.FIRST_COMPLETED)
            yield host_port(settings.host, listener.getsockname()[1])
        finally:
            begun.cancel()
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: `termination` waits for them."""
        yield
