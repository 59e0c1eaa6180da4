"""Chats that the built-in pair serves at once within a memory: `python -m benchmarks.chats`.

Planned as services divide `--memory`, beside caches of a fixed part of the target's weights, which SpecMemo
(arXiv 2506.01986) compares itself with. Memory is what the pair takes above its idle processes. `--serve` starts the
services as they are planned, and has them answer as many chats at once.
"""

import asyncio
import random
from bisect import bisect_left
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.commands import run_command
from benchmarks.processes import environment, latest_process
from benchmarks.resident import Resident
from benchmarks.scrapes import scraped
from coordinator.replicas.clients import RemoteVerifier
from paceline.cli.options import comma_counts
from paceline.client import Client
from paceline.planning.dimensions import read_dimensions
from paceline.planning.flags import variables
from paceline.planning.memory import MIB, kv_bytes, token_bytes
from paceline.planning.search import (
    CHUNKS,
    INT8_STEPS,
    PAGE_TOKENS,
    Candidate,
    Int8,
    Pair,
    Setting,
    Workload,
    floor_costs,
    weighed,
)
from paceline.planning.speed import MACHINES
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from paceline.process.variables import NO_HEADS
from paceline.types import GenerationRequest, TokenIds
from paceline.wire.channel import open_channel

MOST_CHATS = 1 << 14
LOOK_S = 0.05
"""From one look at how many are served to the next."""
LOOK_TIMEOUT_S, CHAT_TIMEOUT_S = 30.0, 600.0
RATIOS = (2, 3, 5, 8, 12, 15)
"""Target's weights to a fixed cache; the paper has 2 to 15."""


@dataclass(frozen=True)
class Chats:
    """Chats of one length with so many drafts, for one pair."""

    pair: Pair
    token_count: int
    draft_count: int
    int8: Int8

    def planned(self, budget_bytes: int) -> int:
        """Return how many fit at once, each a row of every round."""
        return max(self._planned(budget_bytes, chunk) for chunk in CHUNKS)

    def chosen(self, budget_bytes: int) -> Candidate:
        """Return the services that hold as many as are planned."""
        chunk = max(CHUNKS, key=lambda one: self._planned(budget_bytes, one))
        return self._weighed(self._planned(budget_bytes, chunk), chunk)

    def _planned(self, budget_bytes: int, chunk_tokens: int) -> int:
        counts = range(1, MOST_CHATS + 1)
        return bisect_left(counts, True, key=lambda count: self.total_bytes(count, chunk_tokens) > budget_bytes)

    def with_ratio(self, ratio: int, budget_bytes: int) -> int:
        """Return how many are served where the target's cache takes one part in `ratio` of its weights, whatever the
        memory is: none if that does not fit."""
        chunk = CHUNKS[0]
        reserved = self._weighed(1, chunk).target.weights // ratio
        count = min(reserved // self._chat_bytes, MOST_CHATS)
        if not count:
            return 0
        unused = reserved - count * self._chat_bytes
        return count if self.total_bytes(count, chunk) + unused <= budget_bytes else 0

    @property
    def _chat_bytes(self) -> int:
        """Bytes of a chat in the target's cache."""
        a_token = token_bytes(self.pair.target, self.pair.target_form(self.int8))
        return kv_bytes(a_token, 1, self.token_count + self.draft_count, PAGE_TOKENS)

    def total_bytes(self, count: int, chunk_tokens: int) -> int:
        """Return what both services take above their idle processes."""
        one = self._weighed(count, chunk_tokens)
        processes = one.target.process + (one.draft.process if one.draft else 0)
        return one.total_bytes - processes

    def _weighed(self, count: int, chunk_tokens: int) -> Candidate:
        workload = Workload(count, self.token_count, self.token_count // 2, acceptance=0.7)
        costs = floor_costs(self.pair, MACHINES[self.pair.device])[INT8_STEPS.index(self.int8)]
        return weighed(self.pair, workload, costs, Setting(self.draft_count, count, chunk_tokens, self.int8))


def fitting(pair: Pair, token_count: int, draft_count: int, budget_bytes: int) -> Chats:
    """Return chats with weights as they are, or with int8 where not one would fit else."""
    steps = [Chats(pair, token_count, draft_count, step) for step in INT8_STEPS]
    return next((one for one in steps if one.planned(budget_bytes)), steps[-1])


@dataclass(frozen=True)
class Served:
    """What came of chats that began at once."""

    most_at_once: int
    """Most of them that had their tokens in the target's cache together."""
    preemption_count: int
    """Chats that gave their cache up for others."""
    peak_shares: tuple[float, float]
    """Peaks of the target's and of the draft's process, as shares of their memory."""

    @property
    def words(self) -> str:
        target, draft = self.peak_shares
        return f"{self.most_at_once} at once, {self.preemption_count} preempted; {target:.0%} and {draft:.0%} of memory"


async def served(chats: Chats, budget_bytes: int) -> Served:
    """Start the built-in pair as planned, and have it answer as many chats at once, each half prompt, half output."""
    chosen = chats.chosen(budget_bytes)
    assert chosen.draft
    async with AsyncExitStack() as stack:
        with environment(variables(chosen, "builtin:target", "builtin:draft", NO_HEADS)):
            options = ClusterOptions(metrics_port=0, log_level="warning")
            addresses = await stack.enter_async_context(running_cluster(options))
        processes = [Resident(latest_process(f"{role}_service").pid) for role in ("target", "draft")]
        target = RemoteVerifier(await stack.enter_async_context(open_channel(addresses.target)), LOOK_TIMEOUT_S)
        client = await stack.enter_async_context(Client(addresses.coordinator))
        answers = asyncio.gather(*(_chat(client, number, chats) for number in range(chosen.setting.row_count)))
        most = 0
        while not answers.done():
            most = max(most, (await target.describe(LOOK_TIMEOUT_S)).cache.sequence_count)
            await asyncio.sleep(LOOK_S)
        await answers
        samples = await scraped(addresses.metrics_urls[0])
        preempted = sum(one.value for one in samples if one.name == "paceline_preemptions_total")
        peaks = [process.peak() for process in processes]
    return Served(most, int(preempted), (peaks[0] / chosen.target.total, peaks[1] / chosen.draft.total))


async def _chat(client: Client, number: int, chats: Chats) -> None:
    """Have one chat answered. Prompts have nothing in common, so that no page is shared."""
    rng, half = random.Random(number), chats.token_count // 2
    prompt = TokenIds(tuple(rng.randrange(8, chats.pair.target.vocabulary_size) for _ in range(half)))
    request = GenerationRequest(prompt, max_new_tokens=chats.token_count - half, ignore_end_tokens=True)
    await client.complete(request, timeout_s=CHAT_TIMEOUT_S)


def main(memory_mib: str = "64,128,256", tokens: str = "128,512", draft_count: int = 5, serve: bool = False) -> None:
    """Print a table of chats by memory and tokens of a chat."""
    pair = Pair(read_dimensions("builtin:target"), read_dimensions("builtin:draft"))
    table = Table(
        "MiB", "tokens", "int8 weights", "planned", *(f"1:{ratio}" for ratio in RATIOS), *(["served"] if serve else [])
    )
    for budget in comma_counts("--memory-mib", memory_mib):
        for token_count in comma_counts("--tokens", tokens):
            chats = fitting(pair, token_count, draft_count, budget * MIB)
            fixed = [str(chats.with_ratio(ratio, budget * MIB)) for ratio in RATIOS]
            own = [asyncio.run(served(chats, budget * MIB)).words] if serve else []
            table.add_row(str(budget), str(token_count), chats.int8, str(chats.planned(budget * MIB)), *fixed, *own)
    Console(highlight=False, width=160).print(table)


if __name__ == "__main__":
    run_command(main)
