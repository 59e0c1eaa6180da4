"""HTTP on a connection: uvicorn's, with our answer to what is no HTTP. Knows no paths."""

import asyncio
import socket

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.gateway.errors import invalid
from paceline.request_ids import REQUEST_ID, request_id_of

log = structlog.get_logger()
UNREAD_OPTION: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
"""Linux has it."""
LONGEST_MS = 2**31 - 1
REST_S = 620
"""Time for a request's head to come, on a new connection and after an answer. It is longer than balancers keep theirs,
Google's for 600 s: what one of them sends at the moment when its connection is closed here is lost.
"""
READ_AHEAD_BYTES = 64 << 10
"""Of what follows a request that is not answered yet."""
NO_HTTP = invalid("the request is no HTTP/1.1 that can be read; its line, its headers or its chunks are broken")


class Http(H11Protocol):
    """A connection. What breaks HTTP's rules is answered here, before the application or in its place."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Read on. Only a whole head ends the time in which it has to come, and not the rest of a refused body."""
        resting, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        before = self.cycle
        super().data_received(data)
        if resting and self.cycle is before:
            self.timeout_keep_alive_task = resting
        elif resting:
            resting.cancel()

    def handle_events(self) -> None:
        """Go on reading behind a request: who reads no further never learns that the client has gone."""
        super().handle_events()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < READ_AHEAD_BYTES:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # else what is lost would be kept for that time

    def send_400_response(self, msg: str) -> None:
        """Answer in the form of all errors, unless the answer has begun already, and hang up."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            length = str(len(NO_HTTP.body))
            headers = [("content-type", "application/json"), ("content-length", length), ("connection", "close")]
            request_id = request_id_of("")
            log.info("a request was no HTTP", peer=self.client, request_id=request_id)
            headers.append((REQUEST_ID, request_id))
            head = h11.Response(status_code=NO_HTTP.status, headers=headers)
            for event in (head, h11.Data(data=NO_HTTP.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle:
            self.cycle.disconnected = True  # so that what the application says from now on is dropped
        self.transport.close()


def hang_up_on_unread(listener: socket.socket, timeout_s: float) -> None:
    """Have the system end connections of which the client has taken nothing that was sent for so long.

    What is written is in its buffers, or the server's, and would stay there for as long as the client answers probes.
    """
    if UNREAD_OPTION is not None:
        timeout_ms = min(round(1e3 * timeout_s), LONGEST_MS)
        listener.setsockopt(socket.IPPROTO_TCP, UNREAD_OPTION, timeout_ms)  # those accepted inherit it
