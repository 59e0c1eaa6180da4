"""Service processes that a test may kill, pause and start again at the same port."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from paceline.client import RetryPolicy, describe_draft, describe_target
from paceline.types import CacheDescription
from tests.ports import port_for_later

GRACE_S = 10
IDLE_S = 6
"""Seconds after which a model service drops sequences that no call names, such as a killed coordinator's."""
PATIENT = RetryPolicy(first_delay_s=0.05, max_delay_s=0.2)


class Service:
    """`python -m module`, which must end with this process."""

    def __init__(self, module: str, *flags: str, log_path: str | None = None) -> None:
        """`log_path` is the file for its standard error; None: this process's."""
        self._module = module
        self._log_path = log_path
        self._flags = flags
        self._port = str(port_for_later())
        self.address = ""
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[str]:
        with open(self._log_path, "w") if self._log_path else nullcontext() as log:
            return subprocess.Popen(
                [sys.executable, "-m", self._module, *self._flags, "--port", self._port, "--stop-with-stdin", "true"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_until_listening(self) -> None:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert " listening on " in line, f"{self._module} ended before it listened"
        self.address = line.split()[-1]

    def kill(self) -> None:
        """Kill as `kill -9`, which notifies nobody."""
        self.process.kill()
        self._ended()

    def _ended(self) -> int:
        # Not `communicate`, which would write to a paused process.
        status = self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        return status

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def terminate(self) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.terminate()
        return await asyncio.to_thread(self._ended)

    async def start_again(self) -> None:
        """Start it at the same port, after it ended."""
        self.process = self._spawn()
        await asyncio.to_thread(self.wait_until_listening)

    async def restart(self) -> None:
        """Kill as `kill -9` and start again."""
        self.kill()
        await self.start_again()

    async def cache(self) -> CacheDescription:
        describe = describe_draft if self._module == "draft_service" else describe_target
        return (await describe(self.address)).cache

    def close(self) -> None:
        if self.process.returncode is None:
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
