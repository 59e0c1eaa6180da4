"""Pods of the built images, rolled over and replaced by another model under load: `python -m benchmarks.rollout`.

podman runs two coordinators, a draft and a target, as `deploy/kubernetes/as_pods.py` makes them of a rendered overlay.
Clients ask all the time, through both coordinators. Meanwhile each pod is restarted. Then the pods of another overlay
start beside them, with another model in the target. Clients go over to these, and the old ones are stopped while they
still answer. Every request names the model that has to answer, and its output is compared with that model's plain
decoding, of which the greedy ones are compared with Hugging Face's.

Exit status 1 when a request fails, an output differs, or a pod does not end with status 0.
"""

import asyncio
import subprocess
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

from benchmarks.commands import run_command
from benchmarks.soak.requests import Asked, make_requests, with_references
from paceline.client import Client
from paceline.errors import PacelineError
from paceline.types import UserMessage

KUBERNETES = Path(__file__).parents[1] / "deploy" / "kubernetes"
GRACE_S = 70
"""Longest time that a pod may take to end; a coordinator's `--shutdown-grace-s` is 60."""
START_S = 600
NEW_PORT_OFFSET = 100
"""All pods share this machine's ports."""
BEGAN_S = time.monotonic()


def say(line: str) -> None:
    print(f"{time.monotonic() - BEGAN_S:6.1f} s  {line}", flush=True)


@dataclass(frozen=True)
class Plan:
    old: Path
    new: Path
    """Both are rendered overlays."""
    client_count: int
    request_count: int
    calm_s: float


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


@dataclass(frozen=True)
class Cluster:
    manifest: str
    pods: tuple[Pod, ...]
    target_model: str

    @property
    def address(self) -> str:
        return ",".join(f"127.0.0.1:{pod.port}" for pod in self.pods if pod.component == "coordinator")


def read_cluster(overlay: Path, port_offset: int) -> Cluster:
    """Return what podman is to run of a rendered overlay."""
    as_pods = KUBERNETES / "as_pods.py"
    manifest = subprocess.check_output([sys.executable, as_pods, overlay, str(port_offset)], text=True)
    found: list[dict[str, Any]] = list(yaml.safe_load_all(manifest))
    settings = {one["metadata"]["name"]: one["data"] for one in found if one["kind"] == "ConfigMap"}
    pods, models = [], []
    for one in found:
        if one["kind"] == "Pod":
            name, component = one["metadata"]["name"], one["spec"]["containers"][0]["name"]
            told, variable = settings[name], f"PACELINE_{component.upper()}"
            pods.append(Pod(name, component, int(told[f"{variable}_PORT"]), int(told[f"{variable}_HEALTH_PORT"])))
            models += [told[f"{variable}_MODEL"]] if component == "target" else []
    return Cluster(manifest, tuple(pods), models[0])


@asynccontextmanager
async def running(overlay: Path, port_offset: int) -> AsyncIterator[Cluster]:
    """Run the pods of a rendered overlay, and yield them when all serve."""
    cluster = read_cluster(overlay, port_offset)
    names = [pod.name for pod in cluster.pods]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(cluster.manifest)
        file.flush()
        try:
            await podman("play", "kube", file.name)
            await asyncio.gather(*map(serving, cluster.pods))
            say(f"{', '.join(names)}: serving, with {cluster.target_model} in the target")
            yield cluster
        finally:
            # In one command: podman 4.3 panics when several remove pods at a time.
            await podman("pod", "rm", "--force", "--ignore", "--time", "0", *names)


async def load_of(client: Client, request_count: int) -> Load:
    """Return requests that name the model the cluster serves, with that model's plain decoding."""
    digest = (await client.describe()).target.identity.model_digest
    requests = [(kind, replace(one, model_digest=digest)) for kind, one in make_requests(request_count, seed=1)]
    asked = await with_references(client, requests)
    say(f"model {digest[:12]}: {len(asked)} requests decoded plainly")
    return Load(client, asked)


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


def unlike_hugging_face(asked: Sequence[Asked], model: str) -> list[str]:
    """Compare the greedy references with Hugging Face's `generate`."""
    # Imported here because it takes torch, which tests do not need.
    import torch

    from paceline.measure.peers.reference import HuggingFaceReference

    torch.set_num_threads(1)  # threads that find no free core would wait for each other
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


async def roll_out(plan: Plan) -> list[str]:
    """Return the problems."""
    moved, over = asyncio.Event(), asyncio.Event()
    async with running(plan.old, 0) as blue, Client(blue.address) as blue_client:
        old = await load_of(blue_client, plan.request_count)
        old_asking = asyncio.create_task(old.run(plan.client_count, moved))
        await asyncio.sleep(plan.calm_s)
        await restart(blue.pods, old)
        async with running(plan.new, NEW_PORT_OFFSET) as green, Client(green.address) as green_client:
            new = await load_of(green_client, plan.request_count)
            moved.set()
            new_asking = asyncio.create_task(new.run(plan.client_count, over))
            problems = await stop(blue.pods, old)
            await old_asking
            await asyncio.sleep(plan.calm_s)
            over.set()
            await new_asking
            problems += await stop(green.pods, new)
    for load, cluster in ((old, blue), (new, green)):
        model = cluster.target_model
        say(f"{model}: {load.ended_count} requests, {load.token_count} tokens, slowest {load.slowest_s:.1f} s")
        problems += load.problems + unlike_hugging_face(load.asked, model)
    return problems


def main(
    old: Annotated[Path, typer.Option(help="Rendered overlay that runs first.")] = KUBERNETES / "rendered/cpu.yaml",
    new: Annotated[Path, typer.Option(help="Another, with other names.")] = KUBERNETES / "rendered/green.yaml",
    clients: Annotated[int, typer.Option(help="Requests in flight.")] = 32,
    requests: Annotated[int, typer.Option(help="Different requests.")] = 96,
    calm_s: Annotated[float, typer.Option(help="Time before the first restart, and after the last stop.")] = 20.0,
) -> None:
    problems = asyncio.run(roll_out(Plan(old, new, clients, requests, calm_s)))
    print("\n".join([*problems, f"{len(problems)} problems"]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    run_command(main)
