"""Run the three services as processes of this machine, for the command line and the tests.

Owns the processes and the order of starting and stopping; knows nothing of models.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from paceline.errors import StartupError

STOP_TIMEOUT_S = 15.0
HOST = "127.0.0.1"
CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class ClusterOptions:
    target_model: str = "builtin:target"
    draft_model: str = "builtin:draft"
    dtype: str = "auto"
    device: str = "auto"
    kv_memory: str = "2GiB"
    layout: str = "paged"
    prefix_sharing: bool = True
    """False where the same prompts are timed again: each is to be computed each time."""
    numerics: str = "auto"
    """The target's; the draft's are always fast."""
    batch_size: int = 8
    draft_count: str = "5"
    """A number, or `auto`."""
    policy: str = "continuous"
    lanes: int | None = None
    coordinator_port: int = 0
    draft_port: int = 0
    target_port: int = 0
    metrics_port: int | None = None
    """The coordinator's; the draft's and the target's are the next two. 0: any free ones; None: no metrics."""
    log_level: str = "warning"
    trace_dir: str | None = None
    """Where each service writes its spans, `coordinator.jsonl` and so on; None: nowhere."""
    target_threads: int | None = None
    draft_threads: int | None = None
    """Unset: as `threads` divides the cores."""

    def threads(self, role: str) -> int:
        """Cores for a model. Two lanes keep both models busy, so they divide the cores; with one they take turns, and
        only a draft is too small to gain from all."""
        chosen = self.target_threads if role == "target" else self.draft_threads
        if chosen is not None:
            return chosen
        take_turns = self.lanes == 1 or self.policy != "continuous"
        draft_threads = max(1, CORES // (2 if take_turns else 4))
        if role == "draft":
            return draft_threads
        return CORES if take_turns else max(1, CORES - draft_threads)


@dataclass(frozen=True)
class Endpoint:
    """Where a service listens."""

    address: str
    """`host:port`"""
    metrics_url: str | None


@dataclass(frozen=True)
class Addresses:
    """`host:port` of each service."""

    coordinator: str
    draft: str
    target: str
    metrics_urls: tuple[str, ...]
    """In the order of the services above; empty when no metrics are served."""


@asynccontextmanager
async def running_cluster(options: ClusterOptions) -> AsyncIterator[Addresses]:
    """Start the services, yield their addresses, stop them: the coordinator first, so that no request loses its models.

    Raises StartupError when one of them ends before it listens; its own message is on stderr by then.
    """
    if options.trace_dir:
        os.makedirs(options.trace_dir, exist_ok=True)
    async with AsyncExitStack() as stack:
        # The two models load side by side, and so start side by side.
        target, draft = await asyncio.gather(
            stack.enter_async_context(running_service("target_service", _model_flags(options, "target"))),
            stack.enter_async_context(running_service("draft_service", _model_flags(options, "draft"))),
        )
        coordinator = await stack.enter_async_context(
            running_service(
                "coordinator",
                [
                    *("--target", target.address, "--draft", draft.address, "--log-level", options.log_level),
                    *("--host", HOST, "--port", str(options.coordinator_port)),
                    *("--batch-size", str(options.batch_size), "--draft-count", options.draft_count),
                    *("--policy", options.policy),
                    *(("--lanes", str(options.lanes)) if options.lanes else ()),
                    *_metrics_flags(options, 0),
                    *_trace_flags(options, "coordinator"),
                ],
            )
        )
        urls = tuple(one.metrics_url for one in (coordinator, draft, target) if one.metrics_url)
        yield Addresses(coordinator.address, draft.address, target.address, urls)


def _metrics_flags(options: ClusterOptions, offset: int) -> list[str]:
    if options.metrics_port is None:
        return []
    return ["--metrics-host", HOST, "--metrics-port", str(options.metrics_port and options.metrics_port + offset)]


def _model_flags(options: ClusterOptions, role: str) -> list[str]:
    model = options.target_model if role == "target" else options.draft_model
    port = options.target_port if role == "target" else options.draft_port
    threads = options.threads(role)
    return [
        *("--model", model, "--dtype", options.dtype, "--device", options.device, "--log-level", options.log_level),
        *("--host", HOST, "--port", str(port), "--threads", str(threads)),
        *("--kv-memory", options.kv_memory, "--layout", options.layout),
        *(() if options.prefix_sharing else ("--prefix-sharing", "false")),
        *(("--numerics", options.numerics) if role == "target" else ()),
        *_metrics_flags(options, 2 if role == "target" else 1),
        *_trace_flags(options, role),
    ]


def _trace_flags(options: ClusterOptions, role: str) -> list[str]:
    return ["--trace-file", os.path.join(options.trace_dir, f"{role}.jsonl")] if options.trace_dir else []


@asynccontextmanager
async def running_service(module: str, flags: Sequence[str]) -> AsyncIterator[Endpoint]:
    """Run `python -m module`; yield where it listens, and stop it with SIGTERM. Raises StartupError."""
    service = ServiceProcess(module, flags)
    try:
        yield await service.start()
    finally:
        await service.stop()


class ServiceProcess:
    """`python -m module`, started as often as it is wanted: after the first time on the same ports."""

    def __init__(self, module: str, flags: Sequence[str]) -> None:
        self.module = module
        self._flags = tuple(flags)
        self._ports: tuple[str, ...] = ()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> Endpoint:
        """Start it and wait until it listens. Raises StartupError when it ends first; its message is on stderr then."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            # Of a flag that is given twice the last one holds.
            *("-m", self.module, *self._flags, *self._ports, "--stop-with-stdin", "true"),
            # Ends when this process does, however it does: no service outlives who started it.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C reaches this process only, which then stops the services in order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        if " listening on " not in line:
            status = await self._process.wait()
            raise StartupError(f"{self.module} ended with status {status} before it listened; see above")
        listening, _, metrics_url = line.strip().partition(", metrics on ")
        endpoint = Endpoint(listening.rpartition(" ")[2], metrics_url or None)
        self._ports = _port_flags(endpoint)
        return endpoint

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, such as SIGSTOP; nothing happens when it has ended."""
        if self._process and self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """End it without warning, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        if self._process:
            await self._process.wait()

    async def stop(self) -> None:
        """End it with SIGTERM, or without warning when that takes too long."""
        self.send_signal(signal.SIGTERM)
        if self._process:
            try:
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                await self.kill()


def _port_flags(endpoint: Endpoint) -> tuple[str, ...]:
    flags: tuple[str, ...] = ("--port", endpoint.address.rpartition(":")[2])
    if endpoint.metrics_url:
        flags += ("--metrics-port", endpoint.metrics_url.rpartition(":")[2].partition("/")[0])
    return flags
