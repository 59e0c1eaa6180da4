"""A request's trace: attributes and events of its span, and the children that tell its way, made at its end.

What was asked and its result stand by the conventions for generative AI. Never the prompt, its tokens or the output's.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import structlog
from opentelemetry import context, trace
from opentelemetry.trace import Link, Span, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from coordinator.requests.generation import Request
from coordinator.requests.traced_request import OwnRound, TracedRequest, counts_by_source
from paceline.types import Chat, GenerationRequest, OutputPiece, UserMessage

log = structlog.get_logger()

Attributes = dict[str, AttributeValue]
LARGEST_INT = 2**63 - 1
"""The largest integer that an attribute can hold."""
TOLD_WITHIN_S = 2.0
"""Seconds within which children are made, of many requests together: between passes of the models, which empty the
processor's caches, they would take twice as long. The event loop waits for none of them."""


def name_request(request_id: str) -> None:
    """Name the request in its call's span, which is the current one."""
    trace.get_current_span().set_attribute("paceline.request_id", request_id)


def begin_request(asked: GenerationRequest, request: Request, model_id: str) -> None:
    """Describe the request in its call's span, which is the current one, and store the span in the request."""
    span = trace.get_current_span()
    if not span.is_recording():
        return
    sampling = asked.sampling
    span.set_attributes(
        {
            "gen_ai.operation.name": "chat" if isinstance(asked.prompt, Chat | UserMessage) else "text_completion",
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": model_id,
            "gen_ai.request.stream": True,
            "gen_ai.request.choice.count": asked.completion_count,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.response.model": model_id,
            "gen_ai.usage.input_tokens": request.prompt_count,
            # As text, for it may be larger than the integers of attributes.
            "paceline.seed": str(request.seed),
        }
    )
    if asked.max_new_tokens is not None:
        span.set_attribute("gen_ai.request.max_tokens", asked.max_new_tokens)
    if asked.seed is not None and asked.seed <= LARGEST_INT:
        span.set_attribute("gen_ai.request.seed", asked.seed)
    request.traced = TracedRequest.of(context.get_current())


def queue_request(request: Request) -> None:
    """Note that the request is queued. Its id is that of its answer from now on."""
    if request.traced:
        request.traced.queued_ns = time.time_ns()
        request.traced.span.set_attribute("gen_ai.response.id", request.request_id)


def deliver(request: Request, piece: OutputPiece, *, is_first: bool) -> None:
    """Note that a piece is about to be sent, as an event if it is the first or the last one of an output."""
    if request.traced is None:
        return
    if is_first:
        request.traced.span.add_event("first_token")
    if piece.finish:
        reason: Attributes = {"paceline.finish_reason": piece.finish.reason.value}
        request.traced.span.add_event("finish", reason | _output(request, piece.completion_index))


def _output(request: Request, index: int) -> Attributes:
    """Return the attribute that names an output, where there are several."""
    return {"paceline.completion_index": index} if len(request.generations) > 1 else {}


class RequestTracer:
    """Adds what is known at a request's end to its trace."""

    def __init__(self, tracer: Tracer | None, thread: Executor) -> None:
        self._tracer = tracer
        self._thread = thread
        self._untold: list[_Story] = []

    def end(self, request: Request, queued_s: float | None, time_to_first_token_s: float | None) -> None:
        """Add the request's result to its span, and have the span's children made."""
        if request.traced is None or self._tracer is None:
            return
        seconds = {"paceline.queued_s": queued_s, "gen_ai.response.time_to_first_chunk": time_to_first_token_s}
        known = {name: value for name, value in seconds.items() if value is not None}
        request.traced.span.set_attributes(_result(request) | known)
        self._untold.append(_Story(self._tracer, request, request.traced))
        if len(self._untold) == 1:
            asyncio.get_running_loop().call_later(TOLD_WITHIN_S, self.tell)

    def tell(self) -> None:
        """Make the children of the requests that have ended, in the thread."""
        untold, self._untold = self._untold, []
        if untold:
            self._thread.submit(_tell, untold)


@contextmanager
def request_tracer(tracer: Tracer | None) -> Iterator[RequestTracer]:
    """Yield a tracer of requests. On exit, wait until all that was noted is told."""
    with ThreadPoolExecutor(1, "traces") as thread:
        requests = RequestTracer(tracer, thread)
        try:
            yield requests
        finally:
            requests.tell()


def _result(request: Request) -> Attributes:
    usages = [generation.usage for generation in request.generations]
    reasons = [generation.output.finish_reason for generation in request.generations]
    return {
        # A prompt counts once, however many outputs it has.
        "gen_ai.usage.cache_read.input_tokens": max((usage.cached_prompt_count for usage in usages), default=0),
        "gen_ai.usage.output_tokens": sum(usage.output_count for usage in usages),
        "gen_ai.response.finish_reasons": [reason.value for reason in reasons if reason],
        "paceline.drafted_count": sum(usage.drafted_count for usage in usages),
        "paceline.accepted_count": sum(usage.accepted_count for usage in usages),
        "paceline.round_count": sum(usage.round_count for usage in usages),
        **counts_by_source(source for usage in usages for source in usage.sources),
    }


class _Story:
    """Makes the children of a request's span from the notes of its rounds, as they stood at its end."""

    def __init__(self, tracer: Tracer, request: Request, traced: TracedRequest) -> None:
        self.request_id = request.request_id
        self._tracer = tracer
        self._request = request
        self._queued_ns, self._ended_ns = traced.queued_ns, time.time_ns()
        self._rounds, self._later = tuple(traced.rounds), dict(traced.later)
        self._unfinished = [one.completion_index for one in request.generations if not one.output.finish_reason]
        self._running = {index: self._cut_off(one) for index, one in traced.running.items()}
        self._around = trace.set_span_in_context(traced.span, context.Context())

    def tell(self) -> None:
        served_ns: dict[int, int] = {}
        for one in self._rounds:
            self._served(one, served_ns)
        for index, later in self._later.items():
            attributes: Attributes = {**later.sums, **_output(self._request, index)}
            self._start("later_rounds", later.began_ns, attributes).end(later.ended_ns)
            served_ns[index] = later.ended_ns
        for index in self._unfinished:
            if index in self._running:
                self._served(self._running[index], served_ns)
            else:
                self._last_wait(index, served_ns.get(index))

    def _cut_off(self, one: OwnRound) -> OwnRound:
        """Return a round that runs as one that ends with the request: when it does end is not its matter any more."""
        return replace(one, round=replace(one.round, ended_ns=self._ended_ns, is_cut_off=True))

    def _served(self, one: OwnRound, served_ns: dict[int, int]) -> None:
        """Tell of a round, and of the queue before it. `served_ns` has the ends of rounds, by completion index."""
        is_first = one.completion_index not in served_ns
        if is_first or one.queued_s:
            self._queue(one, is_first=is_first)
        served_ns[one.completion_index] = one.round.ended_ns
        self._round(one)

    def _queue(self, one: OwnRound, *, is_first: bool) -> None:
        """Tell of the wait before a round: from the submission on or, later, since the output lost its place."""
        waited_ns = round(1e9 * (one.queued_s + one.waited_s))
        began_ns = self._queued_ns if is_first else one.round.began_ns - waited_ns
        self._start("queue", began_ns, _output(self._request, one.completion_index)).end(one.round.began_ns)

    def _last_wait(self, index: int, served_ns: int | None) -> None:
        """Tell how long an output that did not finish had been without a round when the request ended."""
        if served_ns is not None:
            self._start("last_wait", served_ns, _output(self._request, index)).end(self._ended_ns)
        elif self._queued_ns:
            self._start("queue", self._queued_ns, _output(self._request, index)).end(self._ended_ns)

    def _round(self, one: OwnRound) -> None:
        name = "prefill" if one.is_prefill else "round"
        attributes: Attributes = {"paceline.group_size": one.round.group_size, **one.told(), **one.drafted_by}
        if one.round.is_cut_off:
            attributes["paceline.is_cut_off"] = True
        attributes |= _output(self._request, one.completion_index)
        links = [Link(one.round.span)] if one.round.span else None
        span = self._start(name, one.round.began_ns, attributes, links)
        if one.round.error:
            span.set_attribute("error.type", one.round.error)
            span.set_status(StatusCode.ERROR)
        span.end(one.round.ended_ns)

    def _start(self, name: str, began_ns: int, attributes: Attributes, links: list[Link] | None = None) -> Span:
        return self._tracer.start_span(name, self._around, attributes=attributes, links=links, start_time=began_ns)


def _tell(untold: Iterable[_Story]) -> None:
    for story in untold:
        try:
            story.tell()
        except Exception as error:  # of a span processor, which may be anybody's
            log.exception("spans were lost", exc_info=error, request_id=story.request_id)
