"""The services as processes that can be killed, paused, and started again at the same address."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.soak.changing_model import ChangingModel
from paceline.builtin import resolve_model
from paceline.kv_memory import parse_memory
from paceline.process.cluster_plan import HOST
from paceline.process.service_process import Endpoint, ServiceProcess

ROLES = ("target", "draft", "coordinator")
_MODULES = {
    # By name, because the module imports torch.
    "target": "benchmarks.soak.troubled_target",
    "draft": "draft_service",
    "coordinator": "coordinator",
}


@dataclass(frozen=True)
class SoakOptions:
    target_count: int = 1
    draft_count: int = 1
    target_model: str = "builtin:target"
    draft_model: str = "builtin:draft"
    dtype: str = "auto"
    """Dtype of the targets."""
    kv_memory: str = "64MiB"
    """Cache of each model service; small, so that all of it is in use before memory is first sampled."""
    target_memory: str | None = None
    """For all that each target takes, in place of its cache's memory."""
    draft_memory: str | None = None
    sequence_ttl_s: float = 20.0
    """Seconds after which a model service forgets the sequences of a killed coordinator."""
    tls_flags: tuple[str, ...] = ()
    """TLS flags of every service."""
    coordinator_flags: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Most bytes of a service's process by role, where they are bounded."""
        given = {"target": self.target_memory, "draft": self.draft_memory}
        return {role: parse_memory(memory) for role, memory in given.items() if memory}


@dataclass(frozen=True)
class Member:
    """One service of the cluster."""

    name: str
    """Such as `target-0`."""
    role: str
    process: ServiceProcess
    endpoint: Endpoint


def role_of(name: str) -> str:
    """Return the role of the member of this name."""
    return name.partition("-")[0]


@dataclass(frozen=True)
class ProcessCluster:
    members: tuple[Member, ...]
    target_model: ChangingModel

    def of_role(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]

    @property
    def coordinator(self) -> Member:
        return self.of_role("coordinator")[0]


@asynccontextmanager
async def running_processes(options: SoakOptions) -> AsyncIterator[ProcessCluster]:
    """Start all services, yield them, and stop them, the coordinator first."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        target_model = ChangingModel(resolve_model(options.target_model), folder)
        target_flags = _model_flags(options, str(target_model.path), options.target_memory)
        target_flags += ["--dtype", options.dtype]
        draft_flags = _model_flags(options, options.draft_model, options.draft_memory)
        models = await asyncio.gather(
            *(_start(stack, f"target-{n}", "target", target_flags) for n in range(options.target_count)),
            *(_start(stack, f"draft-{n}", "draft", draft_flags) for n in range(options.draft_count)),
        )
        addresses = {
            role: ",".join(one.endpoint.address for one in models if one.role == role) for role in ("target", "draft")
        }
        flags = ["--target", addresses["target"], "--draft", addresses["draft"]]
        flags += [*options.coordinator_flags, *options.tls_flags]
        coordinator = await _start(stack, "coordinator", "coordinator", flags)
        yield ProcessCluster((*models, coordinator), target_model)


async def _start(stack: AsyncExitStack, name: str, role: str, flags: Sequence[str]) -> Member:
    process = ServiceProcess(_MODULES[role], [*flags, "--host", HOST, "--metrics-port", "0", "--log-level", "error"])
    stack.push_async_callback(process.stop)
    return Member(name, role, process, await process.start())


def _model_flags(options: SoakOptions, model: str, memory: str | None) -> list[str]:
    return [
        *("--model", model, "--threads", "1"),
        *(("--memory", memory) if memory else ("--kv-memory", options.kv_memory)),
        *("--sequence-ttl-s", str(options.sequence_ttl_s)),
        *options.tls_flags,
    ]
