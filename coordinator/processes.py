"""Several coordinator processes behind one address, and the one that starts them, which serves nothing itself.

All listen on the same port, and the kernel spreads connections among them (SO_REUSEPORT). Each is a coordinator of its
own: nothing is shared but the model services, so a process that ends costs its own requests a retry and no other
anything. Owns their ports, their start, and their end.
"""

import asyncio
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import structlog

from coordinator.config import CoordinatorSettings
from paceline.errors import StartupError
from paceline.process.service import announce
from paceline.process.service_process import STOP_SLACK_S, ServiceProcess
from paceline.process.settings import as_flags
from paceline.process.supervision import keep_running
from paceline.tasks import side_by_side
from paceline.wire import termination
from paceline.wire.ports import Listening, bound, host_port

log = structlog.get_logger()


async def supervise(settings: CoordinatorSettings) -> None:
    """Run the processes until told to stop; start again what ends.

    Raise StartupError when a process cannot start at first, or cannot start again and no other one serves.
    """
    with (
        reserved("--port", settings.host, settings.port) as port,
        reserved("--health-port", settings.host, settings.health_port) as health_port,
    ):
        assert port is not None, "a coordinator has a port; only health checks may have none"
        ports = as_flags({"port": port, "health_port": health_port})
        processes = [
            ServiceProcess("coordinator", (*sys.argv[1:], *ports, *_flags_of(settings, index)))
            for index in range(settings.processes)
        ]
        try:
            async with side_by_side() as starting:
                starts = [starting.create_task(one.start()) for one in processes]
            endpoints = [start.result() for start in starts]
            for index, endpoint in enumerate(endpoints):
                log.info("process listens", index=index, pid=processes[index].pid, metrics=endpoint.metrics_url)
            announce("coordinator", host_port(settings.host, port), *(one.metrics_url for one in endpoints))
            async with side_by_side() as watching:
                watches = [watching.create_task(_keep_up(processes, index)) for index in range(len(processes))]
                await termination(stop_with_stdin=settings.stop_with_stdin)
                for watch in watches:
                    watch.cancel()
        finally:
            timeout_s = settings.shutdown_grace_s + STOP_SLACK_S
            await asyncio.gather(*(one.stop(timeout_s) for one in processes))


async def _keep_up(processes: Sequence[ServiceProcess], index: int) -> NoReturn:
    """Start one of the processes again whenever it ends, and go on with that while another one serves."""
    await keep_running(
        processes[index],
        partial(log.warning, index=index),
        others_serve=lambda: any(one.is_listening for one in processes),
    )


def _flags_of(settings: CoordinatorSettings, index: int) -> tuple[str, ...]:
    """Return the flags that make a process the one with this index."""
    metrics_port = settings.metrics_port and settings.metrics_port + index
    trace_file = settings.trace_file and settings.trace_file.with_stem(f"{settings.trace_file.stem}-{index}")
    return as_flags({"process_index": index, "metrics_port": metrics_port, "trace_file": trace_file})


@contextmanager
def reserved(flag: str, host: str, port: int | None) -> Iterator[int | None]:
    """Keep a port that only sockets may share which say so, as the processes' do; yield it, for 0 a free one.

    None is no port. Raise StartupError; `flag` is what set the port.
    """
    if port is None:
        yield None
        return
    if not hasattr(socket, "SO_REUSEPORT"):
        raise StartupError("--processes needs a system with SO_REUSEPORT, such as Linux; give 1")
    with bound(Listening(flag, host, port), is_shared=True) as held:
        yield held.getsockname()[1]
