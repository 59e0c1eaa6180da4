"""What sticky placement spares: `python -m benchmarks.sticky`.

Conversations with several real target services, each turn with all that was said before: placed by load alone, then
where their beginnings are. Each way has services of its own, whose caches are empty. The coordinator works in this
process.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import typer
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from benchmarks.commands import run_command
from coordinator.background import background
from coordinator.config import CoordinatorSettings
from coordinator.replicas.clients import RemoteVerifier
from coordinator.replicas.replica import Replica
from coordinator.wiring import Parts, wired
from paceline.codec.names import TARGET_SERVICE
from paceline.measure.load.summary import percentile
from paceline.process.instruments import Instruments
from paceline.process.service_process import running_service
from paceline.process.variables import NO_DRAFT
from paceline.types import GenerationRequest, ModelDescription, TokenIds, Usage
from paceline.wire import open_channel

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(highlight=False, width=120)
FIRST_TOKEN, LAST_TOKEN = 200, 4000
TARGET_FLAGS = ("--model", "builtin:target", "--port", "0", "--threads", "1", "--log-level", "error")
ASKED_TOKENS = (48, 144)
"""Least and most tokens that a turn adds."""
CALL_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Talk:
    target_count: int
    conversation_count: int
    turn_count: int
    system_tokens: int
    """Tokens that all conversations begin with."""
    answer_tokens: int
    together: int
    """Conversations at once."""
    batch_size: int


class Unaware(RemoteVerifier):
    """A target that shares beginnings and does not say so: it is placed on by load alone."""

    async def describe(self, timeout_s: float) -> ModelDescription:
        model = await super().describe(timeout_s)
        return replace(model, cache=replace(model.cache, prefix_sharing=False))


@dataclass
class Seen:
    """What one placement came to."""

    elapsed_s: float = 0.0
    usages: list[Usage] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    loads: Counter[str] = field(default_factory=Counter)
    """Sums of the sequences that each target had whenever it was looked."""
    outputs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """All that was said in each conversation."""

    @property
    def computed_count(self) -> int:
        return sum(one.prompt_count - one.cached_prompt_count for one in self.usages)

    @property
    def unevenness(self) -> float:
        return max(self.loads.values()) * len(self.loads) / self.loads.total()

    def row(self) -> list[str]:
        p50, p99 = (percentile(self.first_token_s, percent) for percent in (50, 99))
        prompt_count = sum(one.prompt_count for one in self.usages)
        tokens_per_s = sum(one.output_count for one in self.usages) / self.elapsed_s
        return [
            f"{prompt_count}",
            f"{self.computed_count}",
            f"{self.unevenness:.2f}",
            f"{tokens_per_s:.0f}",
            f"{1e3 * p50:.0f} ms",
            f"{1e3 * p99:.0f} ms",
        ]


async def compare(talk: Talk) -> int:
    """Print what both placements came to; return how many conversations they gave other words."""
    table = Table("placement", "prompt tokens", "computed", "highest load", "tokens/s", "first token P50", "P99")
    seen = {}
    for name, remote in (("by load", Unaware), ("sticky", RemoteVerifier)):
        seen[name] = await _talked(talk, remote)
        table.add_row(name, *seen[name].row())
    console.print(table)
    by_load, sticky = seen.values()
    differing = sum(by_load.outputs[number] != output for number, output in sticky.outputs.items())
    ratio = by_load.computed_count / sticky.computed_count
    console.print(
        f"{ratio:.2f} times fewer prompt tokens computed; {differing} of {len(sticky.outputs)} outputs differ"
    )
    return differing


async def _talked(talk: Talk, remote: type[RemoteVerifier]) -> Seen:
    seen = Seen()
    async with _coordinator(talk, remote) as parts:
        looks = asyncio.create_task(_look(parts, seen))
        began_s, places = time.perf_counter(), asyncio.Semaphore(talk.together)
        await asyncio.gather(*(_converse(parts, talk, n, places, seen) for n in range(talk.conversation_count)))
        seen.elapsed_s = time.perf_counter() - began_s
        looks.cancel()
    return seen


@asynccontextmanager
async def _coordinator(talk: Talk, remote: type[RemoteVerifier]) -> AsyncIterator[Parts]:
    settings: dict[str, Any] = {"draft": NO_DRAFT, "target": "unused:1", "draft_count": 0, "lanes": 1}
    async with AsyncExitStack() as stack:
        running = [running_service("target_service", TARGET_FLAGS) for _ in range(talk.target_count)]
        addresses = [(await stack.enter_async_context(one)).address for one in running]
        tasks = await stack.enter_async_context(background())
        asked = CoordinatorSettings(**settings, batch_size=talk.batch_size)
        parts = wired(asked, tasks, Instruments(CollectorRegistry()))
        for address in addresses:
            verifier = remote(open_channel(address, [TARGET_SERVICE]), CALL_TIMEOUT_S)
            stack.push_async_callback(verifier.close)
            replica = Replica(address, verifier, parts.model.check_target, parts.dispatcher.changed)
            parts.dispatcher.changed(replica)
            await replica.look()
        stack.push_async_callback(parts.dispatcher.close)
        yield parts


async def _look(parts: Parts, seen: Seen) -> None:
    while True:
        seen.loads.update({one.address: one.sequence_count for one in parts.dispatcher.describe()})
        await asyncio.sleep(LOOK_INTERVAL_S)


async def _converse(parts: Parts, talk: Talk, number: int, places: asyncio.Semaphore, seen: Seen) -> None:
    rng = random.Random(number)
    said = _words(random.Random("system"), talk.system_tokens)
    async with places:
        for _ in range(talk.turn_count):
            said += _words(rng, rng.randint(*ASKED_TOKENS))
            request = GenerationRequest(TokenIds(said), talk.answer_tokens, ignore_end_tokens=True)
            said += await _answer(parts, request, seen)
            await asyncio.sleep(rng.uniform(0.0, 0.5))  # somebody reads it, and asks again
    seen.outputs[number] = said


async def _answer(parts: Parts, request: GenerationRequest, seen: Seen) -> tuple[int, ...]:
    admitted, began_s = parts.model.admission.admit(request), time.perf_counter()
    parts.dispatcher.submit(admitted)
    token_ids: list[int] = []
    async for piece in admitted.stream.pieces():
        if not token_ids:
            seen.first_token_s.append(time.perf_counter() - began_s)
        token_ids += [token.token_id for token in piece.tokens]
        if piece.finish:
            seen.usages.append(piece.finish.usage)
    return tuple(token_ids)


def _words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count))


@app.command()
def sticky(
    targets: int = 3,
    conversations: int = 48,
    turns: int = 6,
    system_tokens: int = 256,
    answer_tokens: int = 24,
    together: int = 24,
    batch_size: int = 16,
) -> None:
    """Compare the two placements; a `--batch-size` below the number at once shows them where requests wait.

    Exit status 1 when an output differs.
    """
    talk = Talk(targets, conversations, turns, system_tokens, answer_tokens, together, batch_size)
    raise typer.Exit(int(asyncio.run(compare(talk)) > 0))


if __name__ == "__main__":
    run_command(app)
