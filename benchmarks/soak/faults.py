"""Faults at random, one at a time: a service is killed and started again, or stopped for a while and let go on."""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.cluster import ROLES, Member, ProcessCluster

ACTIONS = ("kill", "pause")
KINDS = tuple(f"{action} {role}" for action in ACTIONS for role in ROLES)
MAX_DOWN_S = 1.0
"""Between a kill and the new start."""
MAX_PAUSE_S = 3.0


@dataclass(frozen=True)
class Fault:
    kind: str
    """Such as `kill target`."""
    member: str
    began_s: float
    ended_s: float
    """When the service listened or ran again, on the soak's clock."""


class Faults:
    def __init__(
        self,
        cluster: ProcessCluster,
        kinds: Sequence[str],
        *,
        gap_s: tuple[float, float],
        seed: int,
        began_s: float,
    ) -> None:
        """Between two faults lies a time between the two of `gap_s`."""
        self.done: list[Fault] = []
        self._cluster = cluster
        self._kinds = tuple(kinds)
        self._gap_s = gap_s
        self._rng = random.Random(seed)
        self._began_s = began_s

    async def run(self, until: asyncio.Event) -> None:
        """Disturb until the event; every service runs when this returns. Every kind comes equally often."""
        kinds: list[str] = []
        while self._kinds and not await _happens_within(until, self._rng.uniform(*self._gap_s)):
            kinds = kinds or self._rng.sample(self._kinds, len(self._kinds))
            kind = kinds.pop()
            action, role = kind.split()
            member = self._rng.choice(self._cluster.of_role(role))
            began_s = time.perf_counter() - self._began_s
            await (self._kill(member) if action == "kill" else self._pause(member))
            self.done.append(Fault(kind, member.name, began_s, time.perf_counter() - self._began_s))

    async def _kill(self, member: Member) -> None:
        await member.process.kill()
        await asyncio.sleep(self._rng.uniform(0, MAX_DOWN_S))
        await member.process.start()

    async def _pause(self, member: Member) -> None:
        member.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(0, MAX_PAUSE_S))
        member.process.send_signal(signal.SIGCONT)


async def _happens_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
