"""Whether services keep to `--memory` under random calls: `python -m benchmarks.budget --duration-s 60`.

A target and a draft service, each a process with a budget for all that it takes, get rows of any lengths, from several
callers at once, and calls of any bytes between them. The peak is the kernel's own, of resident memory. It knows
nothing of what a service should answer: that is what the fuzz asks.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import count
from typing import Annotated

import grpc
import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.memory import Configuration
from benchmarks.resident import Resident
from coordinator.replicas.clients import RemoteDrafter, RemoteVerifier
from paceline.checks import MAX_DRAFT_COUNT
from paceline.errors import PacelineError
from paceline.planning.memory import MIB
from paceline.process.service_process import ServiceProcess
from paceline.types import ChoiceRule, Proposal, ProposeRow, SamplingParameters, VerifyOutcome, VerifyRow
from paceline.wire.channel import open_channel
from tests.fuzzing.calls import Call, calls, send
from tests.fuzzing.drawing import for_each

SERVICES = (
    Configuration("target", "builtin", "float32", 0, 8, 5, 256, memory_mib=704),
    Configuration("draft", "builtin", "float32", 0, 8, 5, 128, memory_mib=592),
)
TIMEOUT_S = 60.0
CALLERS = 4
MOST_SEQUENCES = 200
"""Of a caller: together more than a cache holds."""
DRAWN_CALLS = 400
"""Calls of any bytes that are drawn before the clock starts; they are sent again and again."""


class Caller:
    """One that sends rows of random sequences, as often new as longer ones, and never waits between them."""

    def __init__(self, name: int, remote: RemoteVerifier | RemoteDrafter, one: Configuration) -> None:
        self._remote, self._one, self._rng = remote, one, random.Random(name)
        self._name = name
        self._lengths: dict[str, int] = {}
        self.row_count = self.refused_count = 0

    async def call(self) -> None:
        most = self._rng.choice((1, self._one.row_count))
        names = {f"{self._name} {self._rng.randrange(MOST_SEQUENCES)}" for _ in range(self._rng.randint(1, most))}
        try:
            results = await self._sent(sorted(names))
        except PacelineError:
            self.refused_count += len(names)
            return
        self.row_count += len(names)
        for name, result in zip(sorted(names), results, strict=True):
            if isinstance(result, PacelineError):
                self.refused_count += 1
                self._lengths.pop(name, None)
            else:
                self._lengths[name] = result.cached_length

    async def _sent(self, names: Sequence[str]) -> Sequence[VerifyOutcome | Proposal | PacelineError]:
        if isinstance(self._remote, RemoteVerifier):
            return (await self._remote.verify([self._verify_row(name) for name in names])).results
        return (await self._remote.propose([self._propose_row(name) for name in names])).results

    def _verify_row(self, name: str) -> VerifyRow:
        return VerifyRow(name, self._base(name), self._tokens(), self._drafts(), self._rule())

    def _propose_row(self, name: str) -> ProposeRow:
        return ProposeRow(name, self._base(name), self._tokens(), max(1, len(self._drafts())), self._rule())

    def _base(self, name: str) -> int:
        known = self._lengths.get(name, 0)
        return self._rng.choice((known, known, self._rng.randint(0, known)))

    def _tokens(self) -> tuple[int, ...]:
        most = self._rng.choice((1, 1, 1, 20, 4 * self._one.chunk_tokens))
        return self._some(self._rng.randint(1, most))

    def _drafts(self) -> tuple[int, ...]:
        return self._some(self._rng.randint(0, self._rng.choice((self._one.draft_count, MAX_DRAFT_COUNT))))

    def _some(self, length: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(8, 4000) for _ in range(length))

    def _rule(self) -> ChoiceRule:
        temperature = self._rng.choice((0.0, 0.8))
        return ChoiceRule(SamplingParameters(temperature=temperature), seed=self._rng.randrange(1000))


async def endure(one: Configuration, drawn: list[Call], duration_s: float, console: Console) -> bool:
    """Attack one service; tell what it took, and return whether that was within its memory."""
    service = ServiceProcess(f"{one.role}_service", one.flags(f"builtin:{one.role}"))
    try:
        address = (await service.start()).address
        resident = Resident(service.pid)
        resident.begin()
        kind = RemoteVerifier if one.role == "target" else RemoteDrafter
        async with open_channel(address) as channel:
            callers = [Caller(number, kind(open_channel(address), TIMEOUT_S), one) for number in range(CALLERS)]
            ends_s = time.perf_counter() + duration_s
            own = [call for call in drawn if call.method.containing_service.name == f"{one.role.title()}Service"]
            await asyncio.gather(*(_calling(caller, ends_s) for caller in callers), _attacking(channel, own, ends_s))
            peak = resident.peak()
    finally:
        await service.stop()
    rows, refused = sum(caller.row_count for caller in callers), sum(caller.refused_count for caller in callers)
    words = "within" if peak <= one.memory_mib * MIB else "over"
    console.print(f"{one.role}: {rows} rows, {refused} refused; {peak / MIB:.0f} MiB, {words} {one.memory_mib} MiB")
    return words == "within"


async def _calling(caller: Caller, ends_s: float) -> None:
    while time.perf_counter() < ends_s:
        await caller.call()


async def _attacking(channel: grpc.aio.Channel, own: list[Call], ends_s: float) -> None:
    for number in count():
        if time.perf_counter() >= ends_s:
            return
        await send(channel, own[number % len(own)])


def main(duration_s: Annotated[float, typer.Option(help="Of each service")] = 60.0) -> None:
    """End with status 1 if a service takes more than its memory."""
    console, drawn = Console(highlight=False, soft_wrap=True), list[Call]()
    for_each(calls(), DRAWN_CALLS, 1, drawn.append)
    held = [asyncio.run(endure(one, drawn, duration_s, console)) for one in SERVICES]
    raise typer.Exit(not all(held))


if __name__ == "__main__":
    run_command(main)
