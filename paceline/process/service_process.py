"""A service as a process of this machine: its start, its output and its end. Knows nothing of the other services."""

import asyncio
import os
import signal
import sys
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from paceline.errors import StartupError
from paceline.observe.logs import Lossy

STOP_TIMEOUT_S = 15.0
STOP_SLACK_S = 5.0
"""Seconds beyond its grace after which a service that does not end is killed."""
PIECE_BYTES = 1 << 16
"""Most bytes of a service's output read at once."""
LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""The loopback address that reaches a listener on all addresses."""


@dataclass(frozen=True)
class Endpoint:
    """The addresses on which a service listens."""

    address: str
    """`host:port` as seen from this machine."""
    metrics_urls: tuple[str, ...] = ()
    """Of each of its processes, the first one's first; empty when metrics are not served."""

    @property
    def metrics_url(self) -> str | None:
        return self.metrics_urls[0] if self.metrics_urls else None


@asynccontextmanager
async def running_service(module: str, flags: Sequence[str]) -> AsyncIterator[Endpoint]:
    """Run `python -m module`, yield its addresses, and stop it with SIGTERM. Raise StartupError."""
    service = ServiceProcess(module, flags)
    try:
        yield await service.start()
    finally:
        await service.stop()


class ServiceProcess:
    """`python -m module`, which can be started repeatedly. Restarts use the ports of the first start."""

    def __init__(self, module: str, flags: Sequence[str]) -> None:
        self.module = module
        self._flags = tuple(flags)
        self._ports: tuple[str, ...] = ()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._has_announced = False

    @property
    def name(self) -> str:
        """The short name for people, such as `target`."""
        return self.module.removesuffix("_service").rpartition(".")[2]

    @property
    def pid(self) -> int:
        """Id of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_listening(self) -> bool:
        return self._has_announced and self._process is not None and self._process.returncode is None

    async def start(self) -> Endpoint:
        """Start it and wait until it listens.

        Raise StartupError when it ends first, with its message on stderr by then, or when the machine has no room for a
        process: then the error has the system's as its cause.
        """
        self._has_announced = False
        try:
            self._process = await self._started()
        except (OSError, RuntimeError) as error:  # the latter where there is no room for the thread that waits for it
            reason = getattr(error, "strerror", None) or error
            raise StartupError(
                f"{self.module} cannot be started: {reason}; leave memory, processes and open files of this machine "
                "for it"
            ) from error
        assert self._process.stdout is not None
        announced: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(self._process.stdout, announced))
        await asyncio.wait({announced, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        if not announced.done():
            await self.kill()  # if it still runs: its address could never be learned
            raise StartupError(f"{self.module} {await self.ended()} before it listened; see above")
        endpoint = announced_endpoint(announced.result())
        self._ports, self._has_announced = _port_flags(endpoint), True
        return endpoint

    async def _started(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            # The last occurrence of a repeated flag wins.
            *("-m", self.module, *self._flags, *self._ports, "--stop-with-stdin", "true"),
            # The pipe closes whenever this process ends, so no service outlives it.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # So that Ctrl-C reaches only this process, which then stops the services in order.
            start_new_session=True,
        )

    async def _read(self, stdout: asyncio.StreamReader, announced: asyncio.Future[Any]) -> None:
        """Take the line that announces the address, and copy all other output to stderr until the pipe closes.

        The pipe must be read even when nothing can be written, because a full pipe would block the service.
        """
        decoder, unread = getincrementaldecoder("utf-8")("replace"), ""
        while piece := await stdout.read(PIECE_BYTES):
            unread += decoder.decode(piece)
            while not announced.done() and "\n" in unread:
                line, _, unread = unread.partition("\n")
                if line.startswith(f"{self.module} listening on "):
                    announced.set_result(line)
                else:
                    _pass_on(f"{line}\n")
            if announced.done():
                _pass_on(unread)
                unread = ""
        _pass_on(unread)

    async def ended(self) -> str:
        """Wait until it has ended; return how, as `ended by signal 9` or `ended with status 1`."""
        assert self._process is not None
        status = await self._process.wait()
        return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal such as SIGSTOP to the process; do nothing when it has ended."""
        if self._process and self._process.returncode is None:
            # The process object's own method could reap the process and lose its status for those who wait for it.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def kill(self) -> None:
        """End it with SIGKILL and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        if self._process:
            await self._process.wait()

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End it with SIGTERM, or with SIGKILL after a while."""
        self.send_signal(signal.SIGTERM)
        if self._process:
            try:
                await asyncio.wait_for(self._process.wait(), timeout_s)
            except TimeoutError:
                await self.kill()


def _pass_on(text: str) -> None:
    print(text, end="", file=Lossy(sys.stderr), flush=True)


def announced_endpoint(line: str) -> Endpoint:
    """Return the addresses in the line that a service prints when it listens."""
    listening, _, metrics_urls = line.strip().partition(", metrics on ")
    return Endpoint(_reachable(listening.rpartition(" ")[2]), tuple(filter(None, metrics_urls.split(", "))))


def _reachable(address: str) -> str:
    """Return an address that can be called for a listening address, which may mean all addresses of the machine."""
    host, _, port = address.rpartition(":")
    return f"{LOOPBACK.get(host, host)}:{port}"


def _port_flags(endpoint: Endpoint) -> tuple[str, ...]:
    """Return the flags for the same ports. The first metrics port tells those of several processes that follow it."""
    flags: tuple[str, ...] = ("--port", endpoint.address.rpartition(":")[2])
    ports = [int(url.rpartition(":")[2].partition("/")[0]) for url in endpoint.metrics_urls]
    if ports and ports == [*range(ports[0], ports[0] + len(ports))]:
        flags += ("--metrics-port", str(ports[0]))
    return flags
