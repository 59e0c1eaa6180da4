"""The record of each request: its metrics, and one log line at its end, without text of a prompt or an output."""

import time
from dataclasses import asdict

import structlog

from paceline.gateway.account import Account
from paceline.gateway.metrics import GatewayMetrics
from paceline.observe.logs import SpanIds
from paceline.observe.metrics import exemplar_of

log = structlog.get_logger()
CLIENT_LEFT = 499
"""Stands for the status of a request whose client went away, as in nginx's logs."""


class RequestRecord:
    """One request for outputs, from its arrival to its end."""

    def __init__(self, metrics: GatewayMetrics, path: str, request_id: str) -> None:
        self.request_id = request_id
        self.status = 500
        """Status of the answer; of an error in a stream, that of the error. It stands for one that was never sent."""
        self.error_code: str | None = None
        self.span: SpanIds | None = None
        """Its span; None if it is not traced. It ends before its line is written."""
        self._metrics = metrics
        self._path = path
        self._began_s = time.perf_counter()
        self._first_token_s: float | None = None
        metrics.running.inc()

    def note_tokens(self, token_count: int) -> None:
        """Note that so many tokens of output came."""
        if token_count and self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._began_s
            self._metrics.first_token.observe(self._first_token_s, exemplar_of(self.span))
        self._metrics.tokens.inc(token_count)

    def end(self, account: Account | None, *, is_streamed: bool) -> None:
        """Count the request's end and write its line. `account` is None for one that no coordinator got."""
        duration_s = time.perf_counter() - self._began_s
        self._metrics.running.dec()
        self._metrics.ended.labels(self._path, str(self.status)).inc()
        if self.status == 200:
            self._metrics.duration.observe(duration_s, exemplar_of(self.span))
        (log.warning if self.status >= 500 else log.info)(
            "request ended",
            path=self._path,
            status=self.status,
            error=self.error_code,
            streamed=is_streamed,
            request_id=self.request_id,
            prompt_tokens=account.prompt_token_count if account else 0,
            output_tokens=account.token_count if account else 0,
            time_to_first_token_s=None if self._first_token_s is None else round(self._first_token_s, 6),
            duration_s=round(duration_s, 6),
            **(asdict(self.span) if self.span else {}),
        )
