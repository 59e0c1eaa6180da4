"""A gateway without models: it serves the page, and answers every request with the rounds it was given."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.gateway.app import described
from paceline.gateway.page import Page
from paceline.types import (
    CircuitState,
    ClusterDescription,
    ClusterStatistics,
    DraftSource,
    HopTime,
    ModelDescription,
    ReplicaDescription,
    ReplicaState,
    SourceUsage,
)
from tests.fakes.model_services import describe


@dataclass(frozen=True)
class ScriptedRound:
    texts: tuple[str, ...]
    """Its tokens: accepted drafts, and the target's own choice last."""
    source: str | None = None
    drafted: int = 0

    @property
    def accepted(self) -> int:
        return len(self.texts) - 1


@dataclass
class ScriptedGateway:
    rounds: tuple[ScriptedRound, ...] = ()
    plain_texts: tuple[str, ...] | None = None
    """What a request without drafts gets, a token a round; None: the same tokens."""
    endless: bool = False
    """Nothing ends a stream but its client, which `left` notes."""
    error: str | None = None
    """Ends streams."""
    refusal: tuple[int, str] | None = None
    """Status and words for each request of a completion."""
    model_ids: tuple[str, ...] = ("scripted:target",)
    """Names that `/v1/models` has; none while no coordinator has told its model."""
    bearer_token: str | None = None
    round_delay_s: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def app(self) -> Starlette:
        page = Page()
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/cluster", self._cluster),
                Route("/", page.answer),
                Route("/page/{name}", page.answer),
            ]
        )

    async def _models(self, request: Request) -> Response:
        return self._unauthorized(request) or JSONResponse(
            {"object": "list", "data": [{"id": one} for one in self.model_ids]}
        )

    async def _cluster(self, request: Request) -> Response:
        return self._unauthorized(request) or described(CLUSTER)

    async def _complete(self, request: Request) -> Response:
        if refused := self._unauthorized(request):
            return refused
        if self.refusal is not None:
            return _error(*self.refusal)
        body = await request.json()
        self.asked.append({"path": request.url.path, **body})
        is_plain = body["paceline"].get("max_draft_count") == 0
        return StreamingResponse(self._events(request, self._plain() if is_plain else self.rounds))

    def _unauthorized(self, request: Request) -> Response | None:
        is_known = request.headers.get("Authorization") == f"Bearer {self.bearer_token}"
        return None if self.bearer_token is None or is_known else _error(401, "no token, or an unknown one")

    def _plain(self) -> tuple[ScriptedRound, ...]:
        texts = self.plain_texts or tuple(text for one in self.rounds for text in one.texts)
        return tuple(ScriptedRound((text,)) for text in texts)

    async def _events(self, request: Request, rounds: tuple[ScriptedRound, ...]) -> AsyncIterator[str]:
        is_chat = "chat" in request.url.path
        for one in rounds:
            text = "".join(one.texts)
            choice = {"index": 0, "finish_reason": None} | ({"delta": {"content": text}} if is_chat else {"text": text})
            yield _event({"choices": [choice], "paceline": {"tokens": _tokens(one), "round": _round(one)}})
            await asyncio.sleep(self.round_delay_s)
        if self.endless:
            try:
                while not await request.is_disconnected():
                    await asyncio.sleep(0.02)
            finally:
                # Starlette may have seen the end first, and cancels this.
                self.left.set()
            return
        if self.error is not None:
            yield _event({"error": {"message": self.error}})
            return
        nothing: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        yield _event({"choices": [{"index": 0, "finish_reason": "length", **nothing}]})
        yield _event({"choices": [], "usage": {"completion_tokens": 0}, "paceline": {"request_id": "one"}})
        yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "error"}}, status)


def _tokens(one: ScriptedRound) -> list[dict[str, Any]]:
    """Return the tokens; a text has the same id wherever it stands."""
    drafts = [one.source if at < one.accepted else None for at in range(len(one.texts))]
    return [
        {"id": sum(text.encode()) + 4 * len(text), "text": text, "source": source, "accepted": source is not None}
        for text, source in zip(one.texts, drafts, strict=True)
    ]


def _round(one: ScriptedRound) -> dict[str, Any]:
    propose_s = 0.0011 * one.drafted if one.source == "draft" else 0.0
    verify_s = 0.0062 + 0.0004 * one.drafted
    propose = {"wire_s": 0.0007, "queued_s": 0.0004, "executed_s": propose_s} if propose_s else None
    verify = {"wire_s": 0.0009, "queued_s": 0.0011, "executed_s": verify_s}
    return {
        "group_size": 2,
        "drafted": one.drafted,
        "accepted": one.accepted,
        "source": one.source,
        "propose": propose,
        "verify": verify,
        "round_s": propose_s + verify_s + 0.0039,
        "waited_s": 0.0008,
    }


@contextmanager
def serving(gateway: ScriptedGateway) -> Iterator[str]:
    """Serve on a free port; yield the address of the page."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(gateway.app(), log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        # In a thread of its own: the browser is driven from this one.
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


def _model(model_id: str, parameter_count: int) -> ModelDescription:
    return replace(describe(model_id), parameter_count=parameter_count)


_HOP = HopTime(0.6, 0.4, 5.1)
CLUSTER = ClusterDescription(
    target=_model("scripted:target", 8_483_616),
    draft=_model("scripted:draft", 918_144),
    batch_size=8,
    draft_count=None,
    policy="continuous",
    lane_count=2,
    live_sequence_count=2,
    waiting_sequence_count=0,
    statistics=ClusterStatistics(
        round_count=1204,
        drafted_count=5120,
        accepted_count=3712,
        committed_count=4916,
        round_s=14.2,
        propose=_HOP,
        verify=_HOP,
        sources=(
            SourceUsage(DraftSource.DRAFT, "scripted:draft", 4210, 2990),
            SourceUsage(DraftSource.SUFFIX, "", 640, 465),
            SourceUsage(DraftSource.PREDICTION, "", 270, 257),
        ),
    ),
    targets=(
        ReplicaDescription("127.0.0.1:7702", ReplicaState.UP, 2, CircuitState.CLOSED),
        ReplicaDescription("127.0.0.1:7704", ReplicaState.DRAINING, 0, CircuitState.CLOSED),
    ),
    drafts=(ReplicaDescription("127.0.0.1:7701", ReplicaState.DOWN, 0, CircuitState.HALF_OPEN),),
)
