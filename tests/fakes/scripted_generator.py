"""What a gateway asks, without a coordinator: it notes the requests and answers with what it was told."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from paceline.client import NO_HEADERS, OnAccepted
from paceline.errors import PacelineError
from paceline.gateway.app import make_app
from paceline.gateway.config import GatewaySettings
from paceline.gateway.endpoint import Gateway
from paceline.gateway.metrics import GatewayMetrics
from paceline.gateway.models import ServedModel
from paceline.gateway.page import Page
from paceline.gateway.reading import BodyRoom
from paceline.gateway.running import Running
from paceline.gateway.serving import listening
from paceline.security.tokens import KnownTokens
from paceline.types import (
    ClusterDescription,
    ClusterStatistics,
    FinishReason,
    GenerationAccepted,
    GenerationFinish,
    GenerationRequest,
    OutputPiece,
    OutputToken,
    Usage,
)
from tests.fakes.model_services import describe

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def token(text: str, token_id: int = 7, **more: Any) -> OutputToken:
    return OutputToken(token_id, text, False, **more)


def pieces(*texts: str, reason: FinishReason = FinishReason.END_TOKEN) -> list[OutputPiece]:
    """Return an output of a token for each text, which come one by one."""
    finish = GenerationFinish(reason, Usage(3, len(texts)))
    made = [OutputPiece((token(text),)) for text in texts]
    return [*made[:-1], replace(made[-1], finish=finish)]


@dataclass
class ScriptedGenerator:
    """Says of every request what it is told to say, for each of its outputs."""

    says: Sequence[OutputPiece] = ()
    fails: PacelineError | None = None
    """Raised after what it says; None: nothing is."""
    refuses: PacelineError | None = None
    """Raised at once; None: nothing is."""
    is_away: PacelineError | None = None
    """Raised instead of a description; None: it describes."""
    waits_for: asyncio.Event | None = None
    """Awaited before the last piece; None: nothing is."""
    pause_s: float = 0.0
    """Time before each piece."""
    asked: list[GenerationRequest] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    """Those of each request."""
    ended_count: int = 0
    """Requests that ended, however."""

    async def generate(
        self,
        request: GenerationRequest,
        *,
        timeout_s: float | None = None,
        on_accepted: OnAccepted | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> AsyncGenerator[OutputPiece, None]:
        self.asked.append(request)
        self.headers.append(headers)
        try:
            if self.refuses:
                raise self.refuses
            if on_accepted:
                on_accepted(GenerationAccepted("r1", request.seed or 0, 3, "digest", "target"))
            for index in range(request.completion_count):
                for piece in self.says:
                    if piece.finish and self.waits_for:
                        await self.waits_for.wait()
                    if self.pause_s:
                        await asyncio.sleep(self.pause_s)
                    yield replace(piece, completion_index=index)
            if self.fails:
                raise self.fails
        finally:
            self.ended_count += 1

    async def describe_once(self) -> ClusterDescription:
        if self.is_away:
            raise self.is_away
        return ClusterDescription(describe("target"), None, 8, 5, "continuous", 2, 0, 0, ClusterStatistics())


@dataclass(frozen=True)
class Door:
    http: httpx2.AsyncClient
    gateway: Gateway

    async def chat(self, **asked: Any) -> httpx2.Response:
        return await self.http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], **asked})

    async def complete(self, **asked: Any) -> httpx2.Response:
        return await self.http.post(COMPLETIONS, json={"prompt": "hi", **asked})


async def _app(
    generator: ScriptedGenerator,
    names: tuple[str, ...] = (),
    tokens: Path | None = None,
    cors_origins: Sequence[str] = (),
    most: int = 100,
    most_bodies_bytes: int = 1 << 22,
    tracer: Tracer | None = None,
    registry: CollectorRegistry | None = None,
    **own: Any,
) -> tuple[ASGIApp, Gateway]:
    registry = registry or CollectorRegistry()
    model = ServedModel(generator, names)
    await model.look()
    settings: dict[str, Any] = {"tool_format": "hermes", "max_body_bytes": 1 << 20, "timeout_s": 60.0, **own}
    bounds = Running(most), BodyRoom(most_bodies_bytes)
    metrics = GatewayMetrics(registry, lambda: model.is_served)
    gateway = Gateway(generator, model, *bounds, metrics, tracer, **settings)
    return make_app(gateway, registry, Page(), KnownTokens(tokens) if tokens else None, cors_origins), gateway


@asynccontextmanager
async def scripted_door(generator: ScriptedGenerator, **settings: Any) -> AsyncIterator[Door]:
    """Yield a client of a gateway that asks the generator, without a network between them."""
    app, gateway = await _app(generator, **settings)
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Door(http, gateway)


@asynccontextmanager
async def scripted_url(generator: ScriptedGenerator, **settings: Any) -> AsyncIterator[str]:
    """Serve a gateway that asks the generator; yield its URL."""
    app, _ = await _app(generator, **settings)
    async with listening(GatewaySettings(coordinator="127.0.0.1:1", port=0), app) as address:
        yield f"http://{address}"
