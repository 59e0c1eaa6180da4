"""A path that makes outputs: from the body to the answer, and to the record of it."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.gateway.answer import Answer, StreamedAnswer, WholeAnswer
from paceline.gateway.apis import COMPLETION, Api, BodyT
from paceline.gateway.errors import HttpError, answer_to, shutting_down, too_many
from paceline.gateway.generating import Deliver, Generator, bounded, generate_all, unless_client_leaves
from paceline.gateway.metrics import GatewayMetrics
from paceline.gateway.models import ServedModel
from paceline.gateway.reading import BODY_TIMEOUT_S, BodyRoom, parse, read_body
from paceline.gateway.record import CLIENT_LEFT, RequestRecord
from paceline.gateway.requests import own_names
from paceline.gateway.running import Running
from paceline.gateway.spans import callers_trace, request_span
from paceline.gateway.sse import SILENCE_S, EventStream, event
from paceline.gateway.tool_calls import ToolFormat
from paceline.observe.logs import active_span
from paceline.request_ids import REQUEST_ID
from paceline.types import GenerationRequest, OutputPiece

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = structlog.get_logger()
FULL = "the gateway has as many requests as it takes (--max-requests); ask again later"
LAST_WORDS_S = 1.0
"""Time that a client has to take the news that the gateway stops."""


@dataclass(frozen=True)
class Gateway:
    """What all requests share."""

    generator: Generator
    model: ServedModel
    running: Running
    bodies: BodyRoom
    metrics: GatewayMetrics
    tracer: "Tracer | None"
    tool_format: ToolFormat
    max_body_bytes: int
    timeout_s: float
    silence_s: float = SILENCE_S
    """Time without an event after which a stream gets a comment."""


class Endpoint(Generic[BodyT]):
    def __init__(self, api: Api[BodyT], gateway: Gateway) -> None:
        self._api = api
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, request = self._gateway, Request(scope, receive)
        record = RequestRecord(gateway.metrics, self._api.path, request.headers.get(REQUEST_ID, ""))
        if refusal := self._refusal():
            record.status, record.error_code = refusal.status, refusal.code
            record.end(None, is_streamed=False)
            raise refusal
        scheme = scope.get("scheme", "http")  # ASGI lets a server leave it out
        call = _Call(self._api, gateway, request, send, record)
        span = request_span(gateway.tracer, self._api.path, scheme, request.headers, lambda: record.status)
        with gateway.running.one(), gateway.bodies.one() as take_room:
            try:
                with span:
                    record.span = active_span()
                    await call.run(take_room)
            finally:
                record.end(call.answer.account if call.answer else None, is_streamed=call.is_streamed)

    def _refusal(self) -> HttpError | None:
        """Return why a request that comes now is refused; None: it is not."""
        running = self._gateway.running
        if running.is_draining:
            return shutting_down()
        return too_many(FULL) if running.is_full else None


class _Call(Generic[BodyT]):
    """One request for outputs."""

    def __init__(self, api: Api[BodyT], gateway: Gateway, request: Request, send: Send, record: RequestRecord) -> None:
        self._api = api
        self._gateway = gateway
        self.request = request
        # The time of the answer begins with the end of the body, so its own error comes first to a client that reads.
        self._send = bounded(send, asyncio.get_running_loop().time() + BODY_TIMEOUT_S + gateway.timeout_s)
        self._events = EventStream(self._send)
        self._record = record
        self.answer: Answer[BodyT] | None = None
        """None until the request is read."""
        self.is_streamed = False
        self._names: Mapping[str, str] = {}
        """Names that the body has for fields of which others have other names, by those that errors have."""

    async def run(self, take_room: Callable[[int], None]) -> None:
        """Read the body, for which `take_room` takes room, and answer."""
        try:
            done = await self._answered(take_room)
            self._record.status = 200 if done else CLIENT_LEFT
        except ClientDisconnect:
            self._record.status = CLIENT_LEFT
        except asyncio.CancelledError:  # by nothing but the end of the server
            await self._cut_off()
        except Exception as error:
            await self._fail(answer_to(error))
            if self._record.status == 500:
                log.error("unexpected error", request_id=self._record.request_id, exc_info=error)

    async def _cut_off(self) -> None:
        """Tell the client that the gateway stops, unless it has all, or does not read."""
        error = shutting_down()
        self._record.status = error.status
        if not self._events.is_whole:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._fail(error)

    async def _answered(self, take_room: Callable[[int], None]) -> bool:
        """Read, generate and answer. Return False when the client left before the end."""
        gateway = self._gateway
        body, model, requests = await read_body(self.request, self._read, gateway.max_body_bytes, take_room)
        self._names = own_names(body)
        self.is_streamed = bool(body.stream)
        span = self._record.span
        parts: tuple[Any, ...] = (
            *(self._api, body, len(requests), model, gateway.tool_format),
            span.trace_id if span else None,
        )
        work = (
            self._streamed(StreamedAnswer(*parts), requests)
            if body.stream
            else self._whole(WholeAnswer(*parts), requests)
        )
        done = await unless_client_leaves(self.request.receive, work)
        # Many clients go when they have read the last event, while the coordinator still says that it has ended.
        return done or self._events.is_whole

    def _read(self, content: bytes) -> tuple[BodyT, str, list[GenerationRequest]]:
        """Return a body, the name for its model and its requests. Raise HttpError that names a wrong field."""
        body, gateway = parse(content, self._api.body), self._gateway
        return body, gateway.model.named(body.model), self._api.requests(body, gateway.tool_format)

    async def _streamed(self, answer: StreamedAnswer[BodyT], requests: list[GenerationRequest]) -> None:
        self.answer = answer
        turn = asyncio.Lock()  # the last event is that of the last piece

        async def deliver(prompt_index: int, piece: OutputPiece) -> None:
            self._record.note_tokens(len(piece.tokens))
            async with turn:
                events = answer.write(prompt_index, piece)
                if not answer.is_long(len(piece.prompt_tokens)):
                    await self._events.send(b"".join(events))
                    return
                while written := await asyncio.to_thread(next, events, b""):
                    await self._events.send(written)

        async with self._events.pinged(self._gateway.silence_s, lambda: answer.account.is_accepted):
            await self._generate(requests, deliver, answer)
        await self._events.end()

    async def _whole(self, answer: WholeAnswer[BodyT], requests: list[GenerationRequest]) -> None:
        self.answer = answer

        async def deliver(prompt_index: int, piece: OutputPiece) -> None:
            self._record.note_tokens(len(piece.tokens))
            answer.add(prompt_index, piece)

        await self._generate(requests, deliver, answer)
        is_long = answer.is_long(answer.prompt_tokens, answer.account.token_count)
        content = await asyncio.to_thread(answer.body) if is_long else answer.body()
        response = Response(content, media_type="application/json")
        await response(self.request.scope, self.request.receive, self._send)

    async def _generate(self, requests: list[GenerationRequest], deliver: Deliver, answer: Answer[BodyT]) -> None:
        gateway = self._gateway
        headers = {REQUEST_ID: self._record.request_id}
        # A tracer sends the gateway's own span, which is a child of the caller's.
        if gateway.tracer is None:
            headers |= callers_trace(self.request.headers)
        accept, timeout_s = answer.account.accept, gateway.timeout_s
        await generate_all(gateway.generator, requests, deliver, accept, timeout_s, headers)

    async def _fail(self, error: HttpError) -> None:
        if error.param == COMPLETION.prompt_param:  # as coordinators call it
            error = replace(error, param=self._api.prompt_param)
        error = error.renamed(self._names)
        self._record.status, self._record.error_code = error.status, error.code
        with suppress(ClientDisconnect):
            if self._events.is_begun:
                await self._events.send(event(error.body.decode()))
                await self._events.end()
            else:
                await error.response(self.request.scope, self.request.receive, self._send)
