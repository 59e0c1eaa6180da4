"""Pods of the built images, rolled over and replaced by another model under load: `python -m benchmarks.rollout`.

podman runs two coordinators, a draft and a target, as `deploy/kubernetes/as_pods.py` makes them of the overlay `cpu`.
Clients ask all the time, through both coordinators. Meanwhile each pod is restarted. Then the same pods with another
model in the target start beside them, clients go over to these, and the old ones are stopped, while they still answer.
Every request names the model that has to answer, and its output is compared with that model's plain decoding.

Exit status 1 when a request fails, an output differs, or a pod does not end with status 0.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import typer
import yaml
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from benchmarks.soak.requests import Asked, make_requests, with_references
from paceline.client import Client
from paceline.errors import PacelineError
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.types import UserMessage

KUBERNETES = Path(__file__).parents[1] / "deploy" / "kubernetes"
OLD_MODEL, NEW_MODEL = "builtin:target", "builtin:draft"
"""Models of the target. The built-in draft decodes by itself just as well, only worse answers."""
GRACE_S = 70
"""Longest time that a pod may take to end; a coordinator's `--shutdown-grace-s` is 60."""
START_S = 600
BEGAN_S = time.monotonic()


def say(line: str) -> None:
    print(f"{time.monotonic() - BEGAN_S:6.1f} s  {line}", flush=True)


@dataclass(frozen=True)
class Pod:
    name: str
    component: str
    port: int
    health_port: int

    @property
    def container(self) -> str:
        return f"{self.name}-{self.component}"  # podman names it so


@dataclass
class Load:
    """Clients that ask one cluster for outputs of one model, each again as soon as it has its answer."""

    client: Client
    asked: Sequence[Asked]
    ended_count: int = 0
    token_count: int = 0
    in_flight_count: int = 0
    slowest_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    async def run(self, client_count: int, until: asyncio.Event) -> None:
        """Keep `client_count` requests in flight until the event; then let the last ones end."""
        numbers = count()

        async def ask_on() -> None:
            while not until.is_set():
                await self._ask(self.asked[next(numbers) % len(self.asked)])

        await asyncio.gather(*(ask_on() for _ in range(client_count)))

    async def _ask(self, asked: Asked) -> None:
        began_s = time.monotonic()
        self.in_flight_count += 1
        try:
            completions = await self.client.complete_all(asked.request)
        except PacelineError as error:
            self.problems.append(f"{asked.kind}: {error}")
        else:
            if tuple(tuple(one.token_ids) for one in completions) != asked.outputs:
                self.problems.append(f"{asked.kind}: the output differs from the model's plain decoding")
            self.token_count += sum(len(one.tokens) for one in completions)
        self.in_flight_count -= 1
        self.ended_count += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)


async def podman(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "podman", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    if process.returncode:
        raise SystemExit(f"podman {' '.join(arguments)}: {err.decode().strip()}")
    return out.decode().strip()


async def serving(pod: Pod) -> None:
    """Return when the pod's health says SERVING, as Kubernetes' probes would ask."""
    async with asyncio.timeout(START_S), grpc.aio.insecure_channel(f"127.0.0.1:{pod.health_port}") as channel:
        stub: Any = HealthStub(channel)  # the published stubs know no methods
        while True:
            try:
                answer = await stub.Check(HealthCheckRequest(), timeout=3)
                if answer.status == HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(0.2)


async def manifest(folder: Path, prefix: str, port_offset: int, target_model: str) -> Path:
    """Write the pods of the overlay `cpu` with this model in the target."""
    overlay = folder / f"{prefix}overlay.yaml"
    overlay.write_text((KUBERNETES / "rendered/cpu.yaml").read_text().replace(OLD_MODEL, target_model))
    arguments = [str(overlay), "--prefix", prefix, "--port-offset", str(port_offset)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(KUBERNETES / "as_pods.py"), *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    made = folder / f"{prefix}pods.yaml"
    made.write_bytes(out)
    return made


def read_pods(made: Path) -> list[Pod]:
    found: list[dict[str, Any]] = list(yaml.safe_load_all(made.read_text()))
    settings = {one["metadata"]["name"]: one["data"] for one in found if one["kind"] == "ConfigMap"}
    pods = []
    for one in found:
        if one["kind"] == "Pod":
            name, component = one["metadata"]["name"], one["spec"]["containers"][0]["name"]
            told, variable = settings[name], f"PACELINE_{component.upper()}"
            pods.append(Pod(name, component, int(told[f"{variable}_PORT"]), int(told[f"{variable}_HEALTH_PORT"])))
    return pods


@asynccontextmanager
async def running(folder: Path, prefix: str, port_offset: int, target_model: str) -> AsyncIterator[list[Pod]]:
    """Run the pods of a cluster, and yield them when all serve."""
    made = await manifest(folder, prefix, port_offset, target_model)
    pods = read_pods(made)
    try:
        await podman("play", "kube", str(made))
        await asyncio.gather(*map(serving, pods))
        say(f"{', '.join(pod.name for pod in pods)}: serving, with {target_model} in the target")
        yield pods
    finally:
        await podman("pod", "rm", "--force", "--ignore", "--time", "0", *(pod.name for pod in pods))


async def load_of(pods: Sequence[Pod], request_count: int, client: Client) -> Load:
    """Return requests that name the model the cluster serves, with that model's plain decoding."""
    digest = (await client.describe()).target.identity.model_digest
    requests = [(kind, replace(one, model_digest=digest)) for kind, one in make_requests(request_count, seed=1)]
    asked = await with_references(client, requests)
    say(f"model {digest[:12]}: {len(asked)} requests decoded plainly")
    return Load(client, asked)


def address(pods: Sequence[Pod]) -> str:
    return ",".join(f"127.0.0.1:{pod.port}" for pod in pods if pod.component == "coordinator")


async def restart(pods: Sequence[Pod], load: Load) -> None:
    """Restart one after the other, each when the one before serves again."""
    for pod in sorted(pods, key=lambda one: ("draft", "target", "coordinator").index(one.component)):
        say(f"{load.ended_count} answered, {load.in_flight_count} under way; restarting {pod.name}")
        await podman("restart", "--time", str(GRACE_S), pod.container)
        await serving(pod)


async def stop(pods: Sequence[Pod], load: Load) -> list[str]:
    """Stop the coordinators and then the models. Return what did not end with status 0."""
    problems = []
    for components in (("coordinator",), ("draft", "target")):
        ending = [pod for pod in pods if pod.component in components]
        names = ", ".join(pod.name for pod in ending)
        say(f"{load.ended_count} answered, {load.in_flight_count} under way; stopping {names}")
        await asyncio.gather(*(podman("stop", "--time", str(GRACE_S), pod.container) for pod in ending))
        for pod in ending:
            status = await podman("inspect", "--format", "{{.State.ExitCode}}", pod.container)
            problems += [f"{pod.name} ended with status {status}"] if status != "0" else []
    return problems


def compare(asked: Sequence[Asked], model: str) -> list[str]:
    """Compare the greedy references with Hugging Face's `generate`."""
    reference = HuggingFaceReference(model, "float32")
    problems, compared = [], 0
    for one in asked:
        prompt = one.request.prompt
        if one.kind in ("greedy", "plain") and isinstance(prompt, UserMessage):
            token_ids = reference.encode(prompt.value, chat=True)
            compared += 1
            if [reference.generate(token_ids, one.request.max_new_tokens or 0)] != [list(two) for two in one.outputs]:
                problems.append(f"{one.kind}: the plain decoding differs from Hugging Face's")
    say(f"{model}: {compared - len(problems)} of {compared} greedy references equal Hugging Face's")
    return problems


async def roll_out(folder: Path, client_count: int, request_count: int, calm_s: float) -> list[str]:
    """Return the problems."""
    moved, over = asyncio.Event(), asyncio.Event()
    async with running(folder, "blue-", 0, OLD_MODEL) as blue, Client(address(blue)) as blue_client:
        old = await load_of(blue, request_count, blue_client)
        old_asking = asyncio.create_task(old.run(client_count, moved))
        await asyncio.sleep(calm_s)
        await restart(blue, old)
        async with running(folder, "green-", 100, NEW_MODEL) as green, Client(address(green)) as green_client:
            new = await load_of(green, request_count, green_client)
            moved.set()
            new_asking = asyncio.create_task(new.run(client_count, over))
            problems = await stop(blue, old)
            await old_asking
            await asyncio.sleep(calm_s)
            over.set()
            await new_asking
            problems += await stop(green, new)
    for load, model in ((old, OLD_MODEL), (new, NEW_MODEL)):
        problems += load.problems + compare(load.asked, model)
        say(f"{model}: {load.ended_count} requests, {load.token_count} tokens, slowest {load.slowest_s:.1f} s")
    return problems


def main(
    client_count: Annotated[int, typer.Option("--clients", help="Requests in flight.")] = 32,
    request_count: Annotated[int, typer.Option("--requests", help="Different requests.")] = 96,
    calm_s: Annotated[
        float, typer.Option(help="Time under load before the first restart, and after the last stop.")
    ] = 20.0,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        problems = asyncio.run(roll_out(Path(folder), client_count, request_count, calm_s))
    print("\n".join([*problems, f"{len(problems)} problems"]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    typer.run(main)
