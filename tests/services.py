"""Service processes that a test may kill, pause and start again at the same port."""

import asyncio
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from paceline.client import RetryPolicy, describe_draft, describe_target
from paceline.process.service_process import announced_endpoint
from paceline.types import CacheDescription
from tests.ports import port_for_later

GRACE_S = 10
IDLE_S = 6
"""Seconds after which a model service drops sequences that no call names, such as a killed coordinator's."""
PATIENT = RetryPolicy(first_delay_s=0.05, max_delay_s=0.2)

# Each process is forked from one that has the libraries, which take seconds of a core to import.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "transformers.modeling_utils"])


def _run(arguments: Sequence[str], variables: Mapping[str, str], log_path: str | None, stdin: Any, stdout: Any) -> None:
    """Be `python -m` with these arguments and variables, on these pipes."""
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(stdin.detach(), 0)
    os.dup2(stdout.detach(), 1)
    if log_path:
        os.dup2(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


class Service:
    """`python -m module`, which must end with this process."""

    def __init__(self, module: str, *flags: str, log_path: str | None = None) -> None:
        """`log_path` is the file for its standard error; None: this process's."""
        self._module = module
        self._log_path = log_path
        self._flags = flags
        self._port = str(port_for_later())
        self.address = ""
        self.metrics_urls: tuple[str, ...] = ()
        self._spawn()

    def _spawn(self) -> None:
        stdin, self._stdin = os.pipe()
        read, stdout = os.pipe()
        self._stdout = os.fdopen(read)
        arguments = (self._module, *self._flags, "--port", self._port, "--stop-with-stdin", "true")
        given = (arguments, dict(os.environ), self._log_path, DupFd(stdin), DupFd(stdout))
        self._process = _processes.Process(target=_run, args=given, daemon=True)
        self._process.start()
        os.close(stdin)
        os.close(stdout)

    def wait_until_listening(self) -> None:
        line = self._stdout.readline()
        assert " listening on " in line, f"{self._module} ended before it listened"
        listens = announced_endpoint(line)
        self.address, self.metrics_urls = listens.address, listens.metrics_urls

    def kill(self) -> None:
        """Kill as `kill -9`, which notifies nobody."""
        self._process.kill()
        self._ended()

    def _ended(self) -> int:
        self._process.join(60)
        os.close(self._stdin)
        self._stdout.close()
        assert self._process.exitcode is not None, f"{self._module} does not end"
        return self._process.exitcode

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    async def ended(self) -> int:
        """Wait until it has ended by itself; return the exit status."""
        return await asyncio.to_thread(self._ended)

    async def terminate(self) -> int:
        """Send SIGTERM; return the exit status."""
        self._process.terminate()
        return await self.ended()

    async def start_again(self) -> None:
        """Start it at the same port, after it ended."""
        self._spawn()
        await asyncio.to_thread(self.wait_until_listening)

    async def restart(self) -> None:
        """Kill as `kill -9` and start again."""
        self.kill()
        await self.start_again()

    async def cache(self) -> CacheDescription:
        describe = describe_draft if self._module == "draft_service" else describe_target
        return (await describe(self.address)).cache

    def close(self) -> None:
        if self._process.is_alive():
            self.resume()
            self.kill()


@contextmanager
def running_services(*services: Sequence[str], log_path: str | None = None) -> Iterator[list[Service]]:
    """Start services side by side; each has a module and its flags."""
    with ExitStack() as stack:
        running = []
        for module, *flags in services:
            service = Service(module, *flags, log_path=log_path)
            stack.callback(service.close)
            running.append(service)
        for service in running:
            service.wait_until_listening()
        yield running


@dataclass(frozen=True)
class Trio:
    """One service of each kind."""

    target: Service
    draft: Service
    coordinator: Service

    @property
    def all(self) -> tuple[Service, ...]:
        return self.target, self.draft, self.coordinator


@contextmanager
def running_trio(
    target: Sequence[str] = (), draft: Sequence[str] = (), coordinator: Sequence[str] = ()
) -> Iterator[Trio]:
    """Start a target and a draft with these flags, then a coordinator over them."""
    with ExitStack() as stack:
        models = running_services(["target_service", *target], ["draft_service", *draft])
        verifying, drafting = stack.enter_context(models)
        over = ("--target", verifying.address, "--draft", drafting.address)
        (one,) = stack.enter_context(running_services(["coordinator", *over, *coordinator]))
        yield Trio(verifying, drafting, one)


def model_flags(module: str, checkpoint: Path) -> list[str]:
    return [
        *(module, "--model", str(checkpoint), "--threads", "1", "--kv-memory", "64MiB"),
        *("--log-level", "warning", "--shutdown-grace-s", str(GRACE_S), "--sequence-ttl-s", str(IDLE_S)),
    ]


@dataclass(frozen=True)
class Models:
    """Processes that outlive a test, which must leave them running and empty."""

    targets: tuple[Service, Service]
    drafts: tuple[Service, Service]

    @property
    def all(self) -> tuple[Service, ...]:
        return *self.targets, *self.drafts


async def until_freed(*services: Service) -> None:
    """Wait until the services hold no sequence; a leak lasts until the test times out."""
    for service in services:
        while (cache := await service.cache()).sequence_count or cache.used_bytes:
            await asyncio.sleep(0.05)
