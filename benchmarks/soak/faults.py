"""Faults at random, one at a time. Each is over when the service works again as it did before.

kill: ended without warning and started again. pause: stopped for a while. For a target with a twin that stays well:
fail, every verify call ends with INTERNAL; hang, none is answered, while health checks are; join, it leaves in peace
and joins again; change, a model of other weights is served at its address for a while.
"""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.cluster import ROLES, Member, ProcessCluster
from benchmarks.soak.troubles import ERRORS, HANG

TWIN_KINDS = ("fail target", "hang target", "join target", "change target")
"""Need another target: alone, requests must fail or wait."""
KINDS = (*(f"{action} {role}" for action in ("kill", "pause") for role in ROLES), *TWIN_KINDS)
MAX_DOWN_S = 1.0
"""Between a kill and the new start."""
MAX_PAUSE_S = 3.0
MAX_HANG_S = 12.0
"""So long that calls are given up, not waited for."""


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
        """Between two faults lies a time between the two of `gap_s`. Kinds that need a twin are left out without."""
        self.done: list[Fault] = []
        self._cluster = cluster
        has_twin = len(cluster.of_role("target")) > 1
        self._kinds = tuple(kind for kind in kinds if has_twin or kind not in TWIN_KINDS)
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
            await getattr(self, f"_{action}")(member)
            self.done.append(Fault(kind, member.name, began_s, time.perf_counter() - self._began_s))

    async def _kill(self, member: Member) -> None:
        await member.process.kill()
        await asyncio.sleep(self._rng.uniform(0, MAX_DOWN_S))
        await member.process.start()

    async def _pause(self, member: Member) -> None:
        await self._between(member, signal.SIGSTOP, signal.SIGCONT)

    async def _fail(self, member: Member) -> None:
        await self._between(member, ERRORS, ERRORS)

    async def _hang(self, member: Member) -> None:
        await self._between(member, HANG, HANG, MAX_HANG_S)

    async def _between(
        self, member: Member, first: signal.Signals, last: signal.Signals, longest_s: float = MAX_PAUSE_S
    ) -> None:
        member.process.send_signal(first)
        await asyncio.sleep(self._rng.uniform(0, longest_s))
        member.process.send_signal(last)

    async def _join(self, member: Member) -> None:
        await member.process.stop()
        await asyncio.sleep(self._rng.uniform(0, MAX_PAUSE_S))
        await member.process.start()

    async def _change(self, member: Member) -> None:
        self._cluster.target_model.change()
        await member.process.kill()
        await member.process.start()
        await asyncio.sleep(self._rng.uniform(0, MAX_PAUSE_S))
        self._cluster.target_model.restore()
        await member.process.kill()
        await member.process.start()


async def _happens_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
