"""How calls are carried: servers, channels, statuses, the end of a process. Knows nothing of tokens or models."""

from paceline.rpc.channel import open_channel
from paceline.rpc.exchange import Exchange
from paceline.rpc.exchanges import Exchanges
from paceline.rpc.process import termination
from paceline.rpc.server import RunningServer, ServerOptions, running_server
from paceline.rpc.status import ErrorInterceptor, Handler, answered, ended_code, parsed, translated_errors

__all__ = [
    "ErrorInterceptor",
    "Exchange",
    "Exchanges",
    "Handler",
    "RunningServer",
    "ServerOptions",
    "answered",
    "ended_code",
    "open_channel",
    "parsed",
    "running_server",
    "termination",
    "translated_errors",
]
