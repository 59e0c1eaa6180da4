"""Random faults, one at a time. A fault is over when the service works as before.

kill ends a service without warning and starts it again; pause stops it for a while. Four kinds need a second target:
fail ends every verify call with INTERNAL; hang answers no verify call, only health checks; join stops the target
cleanly and starts it again; change serves a model of other weights at its address for a while.
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
"""Kinds that need another target; without one, requests would fail or wait."""
KINDS = (*(f"{action} {role}" for action in ("kill", "pause") for role in ROLES), *TWIN_KINDS)
MAX_DOWN_S = 1.0
"""Longest time between a kill and the new start."""
MAX_PAUSE_S = 3.0
MAX_HANG_S = 12.0
"""Longest hang; long enough that callers give up their calls."""


@dataclass(frozen=True)
class Fault:
    kind: str
    """Such as `kill target`."""
    member: str
    began_s: float
    ended_s: float
    """Time on the soak's clock when the service listened or ran again."""


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
        """`gap_s` bounds the time between two faults. Kinds that need another target are left out without one."""
        self.done: list[Fault] = []
        self._cluster = cluster
        has_twin = len(cluster.of_role("target")) > 1
        self._kinds = tuple(kind for kind in kinds if has_twin or kind not in TWIN_KINDS)
        self._gap_s = gap_s
        self._rng = random.Random(seed)
        self._began_s = began_s

    async def run(self, until: asyncio.Event) -> None:
        """Disturb until the event, with every kind equally often. Every service runs when this returns."""
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
        await self._between(member, signal.SIGSTOP, signal.SIGCONT, MAX_PAUSE_S)

    async def _fail(self, member: Member) -> None:
        await self._between(member, ERRORS, ERRORS, MAX_PAUSE_S)

    async def _hang(self, member: Member) -> None:
        await self._between(member, HANG, HANG, MAX_HANG_S)

    async def _between(self, member: Member, first: signal.Signals, last: signal.Signals, longest_s: float) -> None:
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
