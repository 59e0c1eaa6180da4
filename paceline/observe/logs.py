"""Set up structured logs, and tell which span is active.

Logs go to stderr, so that stdout stays free for results. Text of prompts and outputs stays out of them.
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
    """What names a span elsewhere: 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str


def active_span() -> SpanIds | None:
    """Return the ids of the span that is active here; None when there is none or it is not sampled."""
    # Whoever started a span has imported the library; without it nothing needs to be loaded to know that none is.
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
        # Not the default traceback: that shows local variables, and prompts with them.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _add_active_span,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info if log_format == "json" else _keep,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Lossy(sys.stderr))),
    )
    structlog.contextvars.bind_contextvars(service=service)


def forward_library_logs() -> None:
    """Write what libraries log or warn of, and what nothing caught, as this process's own lines: in its format too."""
    root = logging.getLogger()
    root.handlers = [_Forwarding()]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda one: _uncaught(one.exc_type, one.exc_value or one.exc_type(), one.exc_traceback)


class _Forwarding(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write a library's line. One that cannot be written raises nothing where it was logged: in a request's way."""
        own, level = structlog.get_logger(), _known_level(record.levelno)
        try:
            own.log(level, record.getMessage(), logger=record.name, exc_info=record.exc_info)
        except Exception as error:
            # Where, and neither what nor with which arguments: they may hold prompts.
            where = f"{record.pathname}:{record.lineno}"
            own.log(
                level, "a line that cannot be written", logger=record.name, where=where, reason=type(error).__name__
            )


def _known_level(number: int) -> int:
    """The highest of the levels with a name of their own that a library's reaches; the lowest where it reaches none."""
    return max((known for known in _LEVELS if known <= number), default=_LEVELS[0])


def _uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    structlog.get_logger().critical("unexpected error", exc_info=(kind, error, traceback))


class Lossy:
    """A stream that drops what it cannot write: a full disk under the log must not end what is logged."""

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
    # What the event says itself wins: it may be written when its span is over.
    return {**asdict(span), **event} if span else event


def _keep(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return event  # the console renderer formats exceptions itself
