"""The settings of a cluster's services on this machine, before any of them runs. Knows nothing of processes."""

import os
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from paceline.extras import check_engine
from paceline.process.settings import as_flags, read_settings
from paceline.process.variables import NO_DRAFT, NO_HEADS, SERVICES, is_set
from paceline.wire.ports import Listening

HOST = "127.0.0.1"
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
    """Of each of its processes; None for every core, except in calls with draft tokens to verify."""
    threads_beside_draft: int | None = None
    """Threads of the target in calls with draft tokens to verify."""
    draft_threads: int | None = None
    """Of each of its processes; None for those that `divided_threads` gives it."""


OTHERWISE = ClusterOptions(log_level="warning")


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
        """The addresses on which the services listen, by the flags of a cluster."""
        services = {
            "--coordinator-port": self.coordinator,
            "--draft-port": self.draft,
            "--target-port": self.target,
            "--http": self.gateway,
        }
        return [
            one._replace(flag=flag) if one.flag == "--port" else one
            for flag, service in services.items()
            if service
            for one in service.settings.listens
        ]


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
    if draft_threads:
        each = max(1, draft_threads // _rank_count("draft", options, otherwise))
        otherwise = replace(otherwise, draft_threads=each)
    draft = _plan("draft", options, otherwise) if has_draft else None
    if options.target_threads is None and not is_set("target", "threads"):
        ranks = _rank_count("target", options, otherwise)
        each, each_beside_draft = (max(1, one // ranks) for one in (CORES, beside_draft))
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


def _rank_count(role: str, options: ClusterOptions, otherwise: ClusterOptions) -> int:
    """Return how many processes a model has, which divide its threads."""
    count: int = _plan(role, options, otherwise).settings.grid.rank_count
    return count


def settings_here(role: str) -> Any:
    """Return the settings that a service would read in this environment without flags. Raise StartupError."""
    nowhere = f"{HOST}:1"
    placeholders = ("--draft", nowhere, "--target", nowhere) if role == "coordinator" else ()
    return _plan(role, OTHERWISE, OTHERWISE, *placeholders).settings


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
