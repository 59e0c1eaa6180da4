"""Transport of calls: servers, channels, statuses and process termination. Knows nothing of tokens or models."""

from paceline.wire.access import check_caller
from paceline.wire.channel import open_channel
from paceline.wire.exchange import Exchange, half_close
from paceline.wire.exchanges import Exchanges
from paceline.wire.handlers import Handler, WrappingInterceptor, wrap
from paceline.wire.process import end_at_signals, ends_with_stdin, termination
from paceline.wire.server import RunningServer, ServerOptions, running_server
from paceline.wire.status import (
    answered,
    as_told,
    code_of,
    cut_off_code,
    parsed,
    tell_end,
    translated_errors,
)

__all__ = [
    "Exchange",
    "Exchanges",
    "Handler",
    "RunningServer",
    "ServerOptions",
    "WrappingInterceptor",
    "answered",
    "as_told",
    "check_caller",
    "code_of",
    "cut_off_code",
    "end_at_signals",
    "ends_with_stdin",
    "half_close",
    "open_channel",
    "parsed",
    "running_server",
    "tell_end",
    "termination",
    "translated_errors",
    "wrap",
]
