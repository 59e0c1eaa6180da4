"""The services as processes of this machine, for the command line and the tests.

Owns the processes and the order of starting and stopping; knows nothing of models. `supervision` restarts processes.
"""

import asyncio
import os
import signal
import sys
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NoReturn

from paceline.errors import StartupError
from paceline.extras import check_engine
from paceline.observe.logs import Lossy
from paceline.process.settings import flag_of, read_settings
from paceline.process.supervision import Tell, fail_at_end, keep_running
from paceline.process.variables import NO_DRAFT, NO_HEADS, SERVICES, is_set
from paceline.tasks import side_by_side
from paceline.wire.ports import Listening, check_ports_free

STOP_TIMEOUT_S = 15.0
PIECE_BYTES = 1 << 16
"""Most bytes of a service's output read at once."""
HOST = "127.0.0.1"
LOOPBACK = {"0.0.0.0": HOST, "[::]": "[::1]"}
"""The loopback address that reaches a listener on all addresses."""
CORES = os.cpu_count() or 1
_MODULES = {
    "coordinator": "coordinator",
    "draft": "draft_service",
    "target": "target_service",
    "gateway": "paceline.gateway",
}


@dataclass(frozen=True)
class ClusterOptions:
    """Settings of a cluster's services. None leaves a setting to the service's variable, or else its default."""

    target_model: str = "builtin:target"
    draft_model: str = "builtin:draft"
    """`none` for no draft service."""
    heads: str = NO_HEADS
    """Heads that draft inside the target service."""
    dtype: str | None = None
    """Dtype of the target; the draft takes what is fastest."""
    quantization: str | None = None
    """Quantisation of the target."""
    target_tensor_parallel: int | None = None
    """Processes that divide each of the target's layers; the draft's variables hold for the draft."""
    target_pipeline_parallel: int | None = None
    """Ranges of the target's layers, each in processes of its own."""
    device: str | None = None
    kv_memory: str | None = None
    layout: str | None = None
    prefix_sharing: bool | None = None
    """False for timing the same prompts repeatedly, so that each is computed every time."""
    numerics: str | None = None
    """Numerics of the target; the draft's are always fast."""
    batch_size: int | None = None
    draft_count: str | None = None
    """A number, or `auto`."""
    policy: str | None = None
    lanes: int | None = None
    shared_suffixes: bool | None = None
    """True allows drafts that are looked up in recent outputs of other requests."""
    host: str | None = HOST
    coordinator_processes: int | None = None
    """Coordinator processes behind its port."""
    coordinator_port: int | None = 0
    draft_port: int | None = 0
    target_port: int | None = 0
    metrics_port: int | None = None
    """Metrics port of the coordinator's first process; those of its others, the draft and the target are the next. 0
    for any free ports."""
    gateway_port: int | None = None
    """Port of the gateway; 0 for any free one; None for no gateway."""
    log_level: str | None = None
    trace_dir: str | None = None
    """Folder for the services' spans, `coordinator.jsonl` and so on; None for no spans."""
    target_threads: int | None = None
    """None for every core, except in calls with draft tokens to verify."""
    threads_beside_draft: int | None = None
    """Threads of the target in calls with draft tokens to verify."""
    draft_threads: int | None = None
    """None for the number that `divided_threads` gives."""


OTHERWISE = ClusterOptions(log_level="warning")


@dataclass(frozen=True)
class Endpoint:
    """The addresses on which a service listens."""

    address: str
    """`host:port` as seen from this machine."""
    metrics_url: str | None


@dataclass(frozen=True)
class Addresses:
    """`host:port` of each service as seen from this machine."""

    coordinator: str
    draft: str | None
    """None without a draft service."""
    target: str
    metrics_urls: tuple[str, ...]
    """URLs of the services that run, in the order above; empty when metrics are not served."""
    gateway: str | None = None
    """None without a gateway."""


@dataclass(frozen=True)
class ServicePlan:
    """One service before it runs."""

    module: str
    flags: tuple[str, ...]
    settings: Any
    """The settings that it will read from the flags and the environment."""


@dataclass(frozen=True)
class ClusterPlan:
    coordinator: ServicePlan
    """Without the models' addresses, which are known only once the model services run."""
    draft: ServicePlan | None
    """None for no draft service."""
    target: ServicePlan
    gateway: ServicePlan | None
    """Without the coordinator's address; None for no gateway."""

    @property
    def listens(self) -> list[Listening]:
        """The addresses on which the services listen."""
        services = (self.coordinator, self.draft, self.target, self.gateway)
        return [one for service in services if service for one in service.settings.listens]


def plan_cluster(options: ClusterOptions, otherwise: ClusterOptions = OTHERWISE) -> ClusterPlan:
    """Decide the services' flags: `options` win over variables, and variables over `otherwise`.

    Raise StartupError for a missing library and for settings that a service would refuse, so that the error comes once,
    and before the models load.
    """
    check_engine()
    nowhere, has_draft = f"{HOST}:1", options.draft_model != NO_DRAFT
    draft_address = nowhere if has_draft else NO_DRAFT
    coordinator = _plan("coordinator", options, otherwise, "--draft", draft_address, "--target", nowhere)
    # As a flag or a variable says: their metrics come before those of the models.
    options, otherwise = (
        replace(one, coordinator_processes=coordinator.settings.processes) for one in (options, otherwise)
    )
    draft_threads, beside_draft = divided_threads(coordinator.settings.lane_count) if has_draft else (None, CORES)
    draft = _plan("draft", options, replace(otherwise, draft_threads=draft_threads)) if has_draft else None
    if options.target_threads is None and not is_set("target", "threads"):
        ranks = _plan("target", options, otherwise).settings.grid.rank_count  # which divide the cores
        each, each_beside_draft = max(1, CORES // ranks), max(1, beside_draft // ranks)
        otherwise = replace(otherwise, target_threads=each, threads_beside_draft=each_beside_draft)
    has_gateway = options.gateway_port is not None
    gateway = _plan("gateway", options, otherwise, "--coordinator", nowhere) if has_gateway else None
    return ClusterPlan(coordinator, draft, _plan("target", options, otherwise), gateway)


def divided_threads(lane_count: int) -> tuple[int, int]:
    """Return the threads of the draft, and of the target in calls with draft tokens.

    With two lanes both models are busy at once, so they divide the cores. With one lane they take turns, and only the
    draft model is too small to gain from all cores.
    """
    if lane_count == 1:
        return max(1, CORES // 2), CORES
    draft_threads = max(1, CORES // 4)
    return draft_threads, max(1, CORES - draft_threads)


def settings_here(role: str) -> Any:
    """Return the settings that a service would read in this environment without flags. Raise StartupError."""
    nowhere = f"{HOST}:1"
    placeholders = ("--draft", nowhere, "--target", nowhere) if role == "coordinator" else ()
    return _plan(role, OTHERWISE, OTHERWISE, *placeholders).settings


def as_flags(values: Mapping[str, object]) -> tuple[str, ...]:
    """Return settings as a service's flags; None leaves one out."""
    known = {name: value for name, value in values.items() if value is not None}
    return tuple(word for name, value in known.items() for word in (flag_of(name), str(value)))


def _plan(role: str, options: ClusterOptions, otherwise: ClusterOptions, *placeholders: str) -> ServicePlan:
    unsaid = {name: value for name, value in _asked(role, otherwise).items() if not is_set(role, name)}
    chosen = unsaid | _asked(role, options)
    flags = as_flags(chosen)
    module = _MODULES[role]
    # Imported by name, because shared code must not import a service.
    kind = getattr(import_module(f"{module}.config"), f"{role.capitalize()}Settings")
    return ServicePlan(module, flags, read_settings(kind, module, [*flags, *placeholders]))


def _asked(role: str, options: ClusterOptions) -> dict[str, object]:
    """Return the values that the options give for a service, by the names of its settings."""
    shared: dict[str, object] = {
        "host": options.host,
        "port": getattr(options, f"{role}_port"),
        "log_level": options.log_level,
        "trace_file": options.trace_dir and os.path.join(options.trace_dir, f"{role}.jsonl"),
    }
    own: tuple[str, ...] = ()
    if role != "gateway":
        shared["metrics_port"] = options.metrics_port and options.metrics_port + _metrics_place(role, options)
    if role == "coordinator":
        shared["processes"] = options.coordinator_processes
        own = ("batch_size", "draft_count", "policy", "lanes", "shared_suffixes")
    if role in ("draft", "target"):
        own = ("device", "kv_memory", "layout", "prefix_sharing")
        shared |= {"model": getattr(options, f"{role}_model"), "threads": getattr(options, f"{role}_threads")}
    if role == "target":
        shared |= {name: getattr(options, f"target_{name}") for name in ("tensor_parallel", "pipeline_parallel")}
        own += ("heads", "dtype", "quantization", "numerics", "threads_beside_draft")
    said = shared | {name: getattr(options, name) for name in own}
    return {name: value for name, value in said.items() if value is not None}


def _metrics_place(role: str, options: ClusterOptions) -> int:
    """Return how many ports for metrics come before that of a service."""
    return SERVICES.index(role) + ((options.coordinator_processes or 1) - 1 if role != "coordinator" else 0)


@asynccontextmanager
async def running_cluster(
    options: ClusterOptions, tell: Tell | None = None, otherwise: ClusterOptions = OTHERWISE
) -> AsyncIterator[Addresses]:
    """Start the services and yield their addresses; on exit stop the coordinator first, so no request loses its models.

    `plan_cluster` decides the settings. With `tell`, which gets messages for people, a service that ends is restarted
    at its address. Without it, the end of a service ends the block with PeerFailed. Raise StartupError when a setting
    is wrong or a service ends before it listens or cannot be restarted; its own message is on stderr by then.
    """
    plan = plan_cluster(options, otherwise)
    check_ports_free(plan.listens)
    if options.trace_dir:
        os.makedirs(options.trace_dir, exist_ok=True)
    models = [ServiceProcess(one.module, one.flags) for one in (plan.target, plan.draft) if one]
    async with AsyncExitStack() as stack:
        for model in models:
            stack.push_async_callback(model.stop)
        async with side_by_side() as starting:
            starts = [starting.create_task(model.start()) for model in models]
        at_target, *at_drafts = (start.result() for start in starts)
        draft = at_drafts[0].address if at_drafts else None
        addresses = ("--target", at_target.address, "--draft", draft or NO_DRAFT)
        coordinator = ServiceProcess(plan.coordinator.module, (*plan.coordinator.flags, *addresses))
        stack.push_async_callback(coordinator.stop)
        async with side_by_side() as watching:

            def watch(service: ServiceProcess) -> asyncio.Task[NoReturn]:
                return watching.create_task(keep_running(service, tell) if tell else fail_at_end(service))

            watches = [watch(model) for model in models]
            at_coordinator = await coordinator.start()
            watches.append(watch(coordinator))
            gateway = await _started_gateway(plan.gateway, at_coordinator.address, stack)
            if gateway:
                watches.append(watch(gateway[0]))
            urls = tuple(one.metrics_url for one in (at_coordinator, *at_drafts, at_target) if one.metrics_url)
            at_gateway = gateway[1].address if gateway else None
            yield Addresses(at_coordinator.address, draft, at_target.address, urls, at_gateway)
            for one in watches:
                one.cancel()


async def _started_gateway(
    plan: ServicePlan | None, coordinator: str, stack: AsyncExitStack
) -> "tuple[ServiceProcess, Endpoint] | None":
    """Start the gateway, and have the stack stop it; None without a plan for one."""
    if plan is None:
        return None
    gateway = ServiceProcess(plan.module, (*plan.flags, "--coordinator", coordinator))
    stack.push_async_callback(gateway.stop)
    return gateway, await gateway.start()


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

    @property
    def name(self) -> str:
        """The short name for people, such as `target`."""
        return self.module.removesuffix("_service").rpartition(".")[2]

    @property
    def pid(self) -> int:
        """Id of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> Endpoint:
        """Start it and wait until it listens. Raise StartupError when it ends first; its message is on stderr then."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            # The last occurrence of a repeated flag wins.
            *("-m", self.module, *self._flags, *self._ports, "--stop-with-stdin", "true"),
            # The pipe closes whenever this process ends, so no service outlives it.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # So that Ctrl-C reaches only this process, which then stops the services in order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        announced: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(self._process.stdout, announced))
        await asyncio.wait({announced, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        if not announced.done():
            await self.kill()  # if it still runs: its address could never be learned
            raise StartupError(f"{self.module} {await self.ended()} before it listened; see above")
        endpoint = announced_endpoint(announced.result())
        self._ports = _port_flags(endpoint)
        return endpoint

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
    listening, _, metrics_url = line.strip().partition(", metrics on ")
    return Endpoint(_reachable(listening.rpartition(" ")[2]), metrics_url or None)


def _reachable(address: str) -> str:
    """Return an address that can be called for a listening address, which may mean all addresses of the machine."""
    host, _, port = address.rpartition(":")
    return f"{LOOPBACK.get(host, host)}:{port}"


def _port_flags(endpoint: Endpoint) -> tuple[str, ...]:
    flags: tuple[str, ...] = ("--port", endpoint.address.rpartition(":")[2])
    if endpoint.metrics_url:
        flags += ("--metrics-port", endpoint.metrics_url.rpartition(":")[2].partition("/")[0])
    return flags
