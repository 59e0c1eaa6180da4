"""Structured logs, and the span that is active.

Logs go to stderr, so that stdout stays free for results. They never contain the text of prompts or outputs.
"""

import logging
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal, TextIO, cast

import structlog

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class SpanIds:
    """The ids of a span as 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str


def active_span() -> SpanIds | None:
    """Return the ids of the active span; None when there is none or it is not sampled."""
    # A started span means that the library is loaded already, so there is no need to import it here.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid or not context.trace_flags.sampled:
        return None
    return SpanIds(f"{context.trace_id:032x}", f"{context.span_id:016x}")


def configure_logs(log_format: LogFormat, log_level: LogLevel, service: str) -> None:
    """Make every `structlog` logger of this process write events of `log_level` and above to stderr."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        # The default traceback shows local variables, which may hold prompts.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            # Of the process, and not of a context: threads that others start have contexts of their own.
            lambda _, __, event: {"service": service, **event},
            structlog.processors.add_log_level,
            _add_active_span,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info if log_format == "json" else _keep,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Lossy(sys.stderr))),
    )


def forward_library_logs() -> None:
    """Write libraries' logs and warnings, and uncaught exceptions, as this process's own log lines."""
    root = logging.getLogger()
    root.handlers = [_Forwarding()]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda one: _uncaught(one.exc_type, one.exc_value or one.exc_type(), one.exc_traceback)


class _Forwarding(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write a library's log line. A failure to format it is logged, not raised into the request that logged it."""
        own, level = structlog.get_logger(), _known_level(record.levelno)
        try:
            own.log(level, record.getMessage(), logger=record.name, exc_info=record.exc_info)
        except Exception as error:
            # The message and its arguments may hold prompts, so only the place is logged.
            where = f"{record.pathname}:{record.lineno}"
            own.log(
                level, "a line that cannot be written", logger=record.name, where=where, reason=type(error).__name__
            )


def _known_level(number: int) -> int:
    """Return the highest named level that `number` reaches, or the lowest named level when it reaches none."""
    return max((known for known in _LEVELS if known <= number), default=_LEVELS[0])


def _uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    structlog.get_logger().critical("unexpected error", exc_info=(kind, error, traceback))


class Lossy:
    """A stream that drops what it cannot write, because a full disk under the log must not stop the service."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _add_active_span(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    span = active_span()
    # Ids in the event itself win, because it may be written after its span has ended.
    return {**asdict(span), **event} if span else event


def _keep(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return event  # the console renderer formats exceptions itself
