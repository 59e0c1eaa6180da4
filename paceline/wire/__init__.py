"""Transport of calls: servers, channels, statuses and process termination. Knows nothing of tokens or models."""

from paceline.wire.channel import open_channel
from paceline.wire.exchange import Exchange
from paceline.wire.exchanges import Exchanges
from paceline.wire.handlers import Handler, WrappingInterceptor, wrap
from paceline.wire.process import termination
from paceline.wire.server import RunningServer, ServerOptions, running_server
from paceline.wire.status import ErrorInterceptor, answered, ended_code, parsed, translated_errors

__all__ = [
    "ErrorInterceptor",
    "Exchange",
    "Exchanges",
    "Handler",
    "RunningServer",
    "ServerOptions",
    "WrappingInterceptor",
    "answered",
    "ended_code",
    "open_channel",
    "parsed",
    "running_server",
    "termination",
    "translated_errors",
    "wrap",
]
