"""The record of each request: its metrics, and one log line at its end.

Owns the clock of a request; knows nothing of rounds. Never holds text of a prompt or an output.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

import grpc
import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from coordinator.requests.generation import Request
from paceline.errors import (
    InvalidRequest,
    ModelChanged,
    Overloaded,
    PacelineError,
    PeerFailed,
    PeerUnavailable,
    PromptTooLong,
    as_result,
)
from paceline.observe.logs import active_span
from paceline.observe.metrics import REQUEST_BUCKETS_S, ROUND_BUCKETS_S, USUAL_CODES, Exemplar, exemplar_of
from paceline.request_ids import request_id_of
from paceline.types import FinishReason, GenerationFinish, OutputPiece, SourceUsage, added_up

log = structlog.get_logger()

_OUR_FAULT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)


class RequestMetrics:
    """Metrics of requests. Those that vLLM has too mean the same here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = REQUEST_BUCKETS_S) -> Histogram:
            return Histogram(f"paceline_{name}", text, buckets=buckets, registry=registry)

        self.ended = counter("requests", "Requests that ended, by gRPC status.", "code")
        self.rejected = counter("requests_rejected", "Requests refused before they were queued.", "reason")
        self.completions = counter("completions", "Outputs that ended, by what ended them.", "finish_reason")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were queued.")
        self.queued = histogram("request_queue_seconds", "Time from queueing to the first round.")
        self.first_token = histogram("time_to_first_token_seconds", "Time from a request to its first token.")
        self.per_token = histogram(
            "time_per_output_token_seconds",
            "Mean time between the tokens of an output after the first.",
            ROUND_BUCKETS_S,
        )
        self.duration = histogram("request_duration_seconds", "Time from a request to its end, if that was a success.")
        # Expected labels exist from the start: a rate misses the step from nothing to one.
        for code in USUAL_CODES:
            self.ended.labels(code.name)
        for error in (InvalidRequest, PromptTooLong, Overloaded, ModelChanged, PeerUnavailable):
            self.rejected.labels(error.reason)
        for reason in set(FinishReason) - {FinishReason.UNSPECIFIED}:
            self.completions.labels(reason.value)


class RequestRecord:
    """One request, from its arrival to its end."""

    def __init__(
        self, metrics: RequestMetrics, clock: Callable[[], float] = time.perf_counter, given_id: str = ""
    ) -> None:
        self.request_id = request_id_of(given_id)
        self.queued: Request | None = None
        """The request; None until it is queued."""
        self._metrics = metrics
        self._clock = clock
        # Looked up now, for the request may end outside of its span.
        self._span = active_span()
        self._began_s = clock()
        self._queued_at_s = 0.0
        """Time of its queueing, once it is queued."""
        self._first_token_s: dict[int, float] = {}
        """Time of the first token sent, by completion index."""
        self._sent_counts: dict[int, int] = {}
        """Tokens sent, by completion index."""
        self._finish_reasons: list[str] = []
        self._error: PacelineError | None = None

    def queue(self, request: Request) -> None:
        """Note that the request is queued: from now on it can fail but not be refused."""
        self.queued = request
        self._queued_at_s = self._clock()
        self._metrics.prompt_tokens.inc(request.prompt_count)

    def deliver(self, piece: OutputPiece) -> bool:
        """Note that a piece is about to be sent. Return whether it brings the request's first token."""
        index, count = piece.completion_index, len(piece.tokens)
        is_first = False
        if count:
            sent_count = self._sent_counts.get(index, 0)
            if not sent_count:
                is_first = self._begin_output(index)
            self._sent_counts[index] = sent_count + count
        if piece.finish:
            self._end_output(index, piece.finish)
        return is_first

    def _begin_output(self, index: int) -> bool:
        """Note the first token of an output; return whether it is the request's."""
        now, is_first = self._clock(), not self._first_token_s
        self._first_token_s[index] = now
        if is_first:
            self._metrics.first_token.observe(now - self._began_s, self._exemplar)
        return is_first

    def _end_output(self, index: int, finish: GenerationFinish) -> None:
        self._finish_reasons.append(finish.reason.value)
        self._metrics.completions.labels(finish.reason.value).inc()
        if (later_count := self._sent_counts.get(index, 0) - 1) > 0:
            elapsed_s = self._clock() - self._first_token_s[index]
            self._metrics.per_token.observe(elapsed_s / later_count, self._exemplar)

    def fail(self, error: Exception) -> None:
        """Note that the request is about to end with this error."""
        self._error = as_result(error) if isinstance(error, PacelineError) else PeerFailed("unexpected")

    def end(self, code: grpc.StatusCode) -> None:
        """Count the request's end, of any kind, and write its log line."""
        duration_s = self._clock() - self._began_s
        self._metrics.ended.labels(code.name).inc()
        # Nobody refused a request whose time was up, however it was carried.
        if self._error and not self.queued and code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            self._metrics.rejected.labels(self._error.reason).inc()
        if code is grpc.StatusCode.OK:
            self._metrics.duration.observe(duration_s, self._exemplar)
        if (queued_s := self.queued_s) is not None:
            self._metrics.queued.observe(queued_s, self._exemplar)
        self._write_line(code, duration_s, queued_s)

    def _write_line(self, code: grpc.StatusCode, duration_s: float, queued_s: float | None) -> None:
        usages = [generation.usage for generation in self.queued.generations] if self.queued else []
        write = log.warning if code in _OUR_FAULT else log.info
        write(
            "request ended",
            request_id=self.request_id,
            code=code.name,
            **self._why(),
            prompt_tokens=usages[0].prompt_count if usages else None,
            output_tokens=sum(usage.output_count for usage in usages),
            rounds=sum(usage.round_count for usage in usages),
            drafted=sum(usage.drafted_count for usage in usages),
            accepted=sum(usage.accepted_count for usage in usages),
            sources=_by_source(source for usage in usages for source in usage.sources),
            queued_s=_rounded(queued_s),
            time_to_first_token_s=_rounded(self.time_to_first_token_s),
            duration_s=_rounded(duration_s),
            **(asdict(self._span) if self._span else {}),
        )

    @property
    def _exemplar(self) -> Exemplar:
        return exemplar_of(self._span)

    def _why(self) -> dict[str, str | list[str]]:
        """Return the reason behind the code. The error's message stays out: it may quote the request."""
        if self._error is None:
            return {"finish_reasons": self._finish_reasons}
        field = self._error.field if isinstance(self._error, InvalidRequest) else ""
        return {"reason": self._error.reason, **({"field": field} if field else {})}

    @property
    def queued_s(self) -> float | None:
        """The time until every generation had its first round; one without a round has waited until now.

        None where nothing waited: a client may have received outputs whole, which need no round.
        """
        generations = self.queued.generations if self.queued else ()
        waits_s = [one.until_first_round_s for one in generations if not one.needed_no_round]
        now_s = self._clock() - self._queued_at_s
        return max((now_s if wait_s is None else wait_s for wait_s in waits_s), default=None)

    @property
    def time_to_first_token_s(self) -> float | None:
        return min(self._first_token_s.values()) - self._began_s if self._first_token_s else None


def _by_source(usages: Iterable[SourceUsage]) -> dict[str, dict[str, int]]:
    """Return draft tokens by source, and by model for draft services that named theirs."""
    return {one.name: {"drafted": one.drafted_count, "accepted": one.accepted_count} for one in added_up(usages)}


def _rounded(seconds: float | None) -> float | None:
    """Round to microseconds: the rest is noise."""
    return None if seconds is None else round(seconds, 6)
