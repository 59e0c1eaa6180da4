"""Bytes that services take above the loaded, idle process, beside the prediction: `python -m benchmarks.memory`.

Each configuration is a real process of a service. Its cache is filled to the last page, and its largest call is made:
all rows with drafts, drawn for, beside a whole chunk of a prompt. The peak is the kernel's own, of resident memory.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.resident import Resident
from coordinator.replicas.clients import RemoteDrafter, RemoteVerifier
from paceline.checks import DECODED_TOKENS
from paceline.errors import PacelineError
from paceline.measure.synthetic.pair import PairOrder, write_pair
from paceline.measure.synthetic.shapes import SHAPES
from paceline.measure.tables import markdown_table
from paceline.planning.dimensions import ModelDimensions, read_dimensions
from paceline.planning.heads import read_heads_size
from paceline.planning.memory import MIB, CallSize, WeightForm, serving_work_bytes
from paceline.process.service_process import ServiceProcess
from paceline.types import (
    GREEDY,
    ChoiceRule,
    ModelDescription,
    Prefilled,
    Proposal,
    ProposeRow,
    SamplingParameters,
    VerifyOutcome,
    VerifyRow,
)
from paceline.wire.channel import open_channel

TIMEOUT_S = 120.0
TOLERANCE = 0.05
PAIR = "100m/5m"
DRAWN = ChoiceRule(SamplingParameters(temperature=0.8), seed=7)
SETTLED_S = 0.5
TIMED_ROUNDS = 20
TREE_DRAFTS = 63
"""With the committed token 64 places of a row: as many as the nodes of Medusa's default tree (arXiv 2401.10774), whose
buffers SpecMemo (arXiv 2506.01986) saves 65 % of."""


@dataclass(frozen=True)
class Configuration:
    role: Literal["target", "draft"]
    model: str
    """`builtin`, or `synthetic` for the random pair."""
    dtype: str
    kv_mib: int
    row_count: int
    draft_count: int
    chunk_tokens: int
    quantization: str = "none"
    heads: str = "none"
    memory_mib: int = 0
    """For all, in place of the cache's; 0: none."""

    def flags(self, path: str) -> list[str]:
        own = ["--heads", self.heads] if self.role == "target" else []
        return [
            *("--model", path, "--dtype", self.dtype, "--quantization", self.quantization, "--threads", "1"),
            *(("--memory", f"{self.memory_mib}MiB") if self.memory_mib else ("--kv-memory", f"{self.kv_mib}MiB")),
            *("--prefill-chunk-tokens", str(self.chunk_tokens), "--max-rows", str(self.row_count + 1)),
            *("--log-level", "warning", *own),
        ]


CONFIGURATIONS = (
    Configuration("target", "builtin", "float32", 64, 8, 5, 256),
    Configuration("target", "builtin", "float32", 48, 4, 3, 64),
    Configuration("target", "builtin", "float32", 256, 32, 8, 512),
    Configuration("target", "builtin", "bfloat16", 64, 8, 5, 256),
    Configuration("target", "builtin", "bfloat16", 32, 16, 5, 128),
    Configuration("target", "builtin", "float32", 64, 8, 5, 256, "int8"),
    Configuration("target", "builtin", "float32", 64, 8, 3, 256, heads="builtin:clover"),
    Configuration("target", "synthetic", "float32", 128, 8, 5, 256),
    Configuration("target", "synthetic", "float32", 256, 20, 5, 512),
    Configuration("target", "synthetic", "bfloat16", 128, 16, 5, 256),
    Configuration("draft", "builtin", "float32", 16, 8, 5, 256),
    Configuration("draft", "synthetic", "float32", 64, 16, 5, 128),
    Configuration("target", "builtin", "float32", 0, 8, 5, 256, memory_mib=704),
    Configuration("target", "synthetic", "float32", 0, 8, 5, 256, memory_mib=1280),
    Configuration("draft", "builtin", "float32", 0, 8, 5, 128, memory_mib=576),
    Configuration("target", "builtin", "float32", 64, 8, 5, 16),
    Configuration("target", "builtin", "float32", 64, 8, TREE_DRAFTS, 16),
)


class Load:
    """Rows of random tokens for one service, until its cache is full."""

    def __init__(self, remote: RemoteVerifier | RemoteDrafter, described: ModelDescription, one: Configuration) -> None:
        self._remote, self._one = remote, one
        self._numbers = random.Random(1)
        self._vocabulary_size, self._max_length = described.vocabulary_size, described.max_length
        cache = described.cache
        self._page_tokens, self._room = cache.page_tokens, cache.max_length
        self._lengths: dict[str, int] = {}

    async def warm(self) -> None:
        """Make the smallest call of each kind, so that code and tables are there, and little of what calls take."""
        await self._prefill("warm", DECODED_TOKENS + 1)
        await self._round(["warm"], draft_count=1)
        self._remote.owe(["warm"])
        await self._remote.release()
        self._lengths.clear()

    async def fill(self) -> None:
        """Fill the cache with sequences of one length, and end with the largest call."""
        one, pages = self._one, self._room // self._page_tokens
        rows = one.row_count
        most = self._max_length // self._page_tokens
        prompt_pages = self._pages(one.chunk_tokens + one.draft_count)
        pages_each = min(most, (pages - prompt_pages) // rows)
        spare = self._pages(one.draft_count + 2)
        for number in range(rows):
            await self._prefill(str(number), (pages_each - spare) * self._page_tokens)
        names = [*self._lengths]
        await self._round(names, one.draft_count)
        growing_pages = rows * (self._pages(one.draft_count + 1) - 1)  # each has its first page already
        while (left := await self._free_pages() - prompt_pages - growing_pages) > 0:
            await self._prefill(f"rest {left}", min(left, most) * self._page_tokens - 1)
        await self._round(names, one.draft_count, self._tokens(one.chunk_tokens))

    async def round_s(self) -> float:
        """Return the median seconds of the load's rounds, chosen for greedily, without a prompt."""
        names, took = [str(number) for number in range(self._one.row_count)], list[float]()
        for _ in range(TIMED_ROUNDS):
            began_s = time.perf_counter()
            await self._round(names, self._one.draft_count, rule=GREEDY)
            took.append(time.perf_counter() - began_s)
        return median(took)

    async def _free_pages(self) -> int:
        cache = (await self._remote.describe(TIMEOUT_S)).cache
        return (cache.capacity_bytes - cache.used_bytes) // (cache.token_bytes * self._page_tokens)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._numbers.randrange(8, self._vocabulary_size) for _ in range(count))

    async def _prefill(self, name: str, count: int) -> None:
        tokens, length = self._tokens(count), 0
        while length < count:
            length = await self._sent(name, length, tokens[length:])
        self._lengths[name] = length

    async def _sent(self, name: str, length: int, tokens: tuple[int, ...]) -> int:
        results: Sequence[VerifyOutcome | Proposal | PacelineError]
        if isinstance(self._remote, RemoteVerifier):
            results = (await self._remote.verify([VerifyRow(name, length, tokens, (), DRAWN)])).results
        else:
            results = (await self._remote.propose([ProposeRow(name, length, tokens, 1, DRAWN)])).results
        (result,) = results
        if isinstance(result, PacelineError):
            raise result
        return result.cached_length

    async def _round(
        self, names: Sequence[str], draft_count: int, prompt: tuple[int, ...] = (), rule: ChoiceRule = DRAWN
    ) -> None:
        """Send a row of each sequence with so many drafts, and one with a prompt of its own."""
        if isinstance(self._remote, RemoteVerifier):
            heads = draft_count if self._one.heads != "none" else 0
            rows = [
                VerifyRow(name, self._lengths[name], self._tokens(1), self._tokens(draft_count), rule) for name in names
            ]
            rows += [VerifyRow("prompt", 0, prompt, (), rule)] if prompt else []
            results: Sequence[object] = (
                await self._remote.verify([replace(row, propose_count=heads) for row in rows])
            ).results
        else:
            asked = [ProposeRow(name, self._lengths[name], self._tokens(1), draft_count, DRAWN) for name in names]
            asked += [ProposeRow("prompt", 0, prompt, draft_count, rule)] if prompt else []
            results = (await self._remote.propose(asked)).results
        for result in results:
            if isinstance(result, Exception):
                raise result
        assert not any(isinstance(result, Prefilled) for result in results[: len(names)])


@dataclass(frozen=True)
class Outcome:
    configuration: Configuration
    predicted: int
    """Bytes above those of the idle process."""
    measured: int
    peak: int
    """Bytes of the whole process."""
    generating: int
    """Bytes of a round beyond committed tokens: drafts' cache, logits and activations."""
    round_s: float
    """Seconds of such a round at the service."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def exceeds(self) -> bool:
        """Whether the process took more than it was given."""
        return 0 < self.configuration.memory_mib * MIB < self.peak


def predicted_bytes(model: ModelDimensions, described: ModelDescription, one: Configuration) -> int:
    """Return the cache's bytes and those of the largest call."""
    form = WeightForm(described.dtype, described.quantization == "int8")
    places = one.row_count * (one.draft_count + 1) if one.role == "target" else one.row_count
    drawn = one.draft_count + 1 if one.role == "target" else 1
    tapped_count = 0 if one.heads == "none" else read_heads_size(one.heads).tapped_count
    call = CallSize(places + 1, one.chunk_tokens, drawn, tapped_count=tapped_count)
    return described.cache.capacity_bytes + serving_work_bytes(model, form, call)


@asynccontextmanager
async def running(one: Configuration, path: str) -> AsyncIterator[tuple[RemoteVerifier | RemoteDrafter, int]]:
    """Start the service; yield its client and its process id."""
    service = ServiceProcess(f"{one.role}_service", one.flags(path))
    try:
        channel = open_channel((await service.start()).address)
        remote = (RemoteVerifier if one.role == "target" else RemoteDrafter)(channel, TIMEOUT_S)
        yield remote, service.pid
        await remote.close()
    finally:
        await service.stop()


async def measured(one: Configuration, path: str, console: Console) -> Outcome:
    async with running(one, path) as (remote, process_id):
        described = await remote.describe(TIMEOUT_S)
        load, resident = Load(remote, described, one), Resident(process_id)
        await load.warm()
        await asyncio.sleep(SETTLED_S)
        before, idle = resident.parts(), resident.begin()
        await load.fill()
        peak = resident.peak()
        cache, round_s = described.cache, await load.round_s()
        drafts_bytes = one.row_count * one.draft_count * cache.token_bytes
        generating = peak - idle - cache.capacity_bytes + drafts_bytes
        found = Outcome(
            one, predicted_bytes(read_dimensions(path), described, one), peak - idle, peak, generating, round_s
        )
        after = resident.parts()
        grown = ", ".join(f"{name} {(after[name] - before[name]) / MIB:+.1f}" for name in before)
        console.print(
            f"{one.role} {one.model}: idle {idle / MIB:.1f} MiB; {grown}; predicted {found.predicted / MIB:.1f}, "
            f"measured {found.measured / MIB:.1f}, {found.error:+.1%}",
            style="dim",
        )
        return found


def row_of(one: Outcome) -> list[str]:
    made = one.configuration
    model = f"{made.role}, {made.model}, {made.dtype}"
    model += f", {made.quantization}" if made.quantization != "none" else ""
    model += ", heads" if made.heads != "none" else ""
    given = f"{made.memory_mib}, {one.peak / MIB:.0f} taken" if made.memory_mib else f"{made.kv_mib} for the cache"
    sizes = [given, *(str(size) for size in (made.row_count, made.draft_count, made.chunk_tokens))]
    return [model, *sizes, f"{one.predicted / MIB:.1f}", f"{one.measured / MIB:.1f}", f"{one.error:+.1%}"]


def beside_trees(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Say how much less each configuration takes to generate than the same one with the places of a tree."""
    trees = {
        replace(one.configuration, draft_count=0): one
        for one in outcomes
        if one.configuration.draft_count == TREE_DRAFTS
    }
    for one in outcomes:
        tree = trees.get(replace(one.configuration, draft_count=0))
        if tree and tree is not one:
            yield (
                f"to generate, {one.configuration.draft_count} drafts of {one.configuration.row_count} rows take "
                f"{one.generating / MIB:.1f} MiB, and trees of {TREE_DRAFTS + 1} nodes {tree.generating / MIB:.1f}: "
                f"{1 - one.generating / tree.generating:.0%} less; a verify takes {1e3 * one.round_s:.1f} ms and "
                f"{1e3 * tree.round_s:.1f}"
            )


def main(
    only: Annotated[list[int] | None, typer.Option(help="Number of a configuration, from 0. Unset: all.")] = None,
) -> None:
    """Print predicted and measured bytes; end with status 1 if one is off by more than 5 % or exceeds its memory."""
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        chosen = [CONFIGURATIONS[number] for number in only] if only else CONFIGURATIONS
        pair = Path(folder) / "pair"
        if any(one.model == "synthetic" for one in chosen):
            write_pair(PairOrder(PAIR, SHAPES[PAIR], pair, 0.7, 1.0, None, 0), lambda tried, found: None)
        outcomes = []
        for one in chosen:
            path = f"builtin:{one.role}" if one.model == "builtin" else str(pair / one.role)
            outcomes.append(asyncio.run(measured(one, path, console)))
    header = ["service", "memory, MiB", "rows", "drafts", "chunk", "predicted", "measured", "error"]
    print(markdown_table(header, [row_of(one) for one in outcomes]))
    for line in beside_trees(outcomes):
        print(line)
    # Services are not planned for trees: nothing of ours drafts so many.
    planned = [one for one in outcomes if one.configuration.draft_count != TREE_DRAFTS]
    if any(abs(one.error) > TOLERANCE or one.exceeds for one in planned):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
