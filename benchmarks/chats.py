"""Chats that the built-in pair serves at once within a memory: `python -m benchmarks.chats`.

Planned as services divide `--memory`, beside caches of a fixed part of the target's weights, which SpecMemo
(arXiv 2506.01986) compares itself with. Memory is what the pair takes above its idle processes. Nothing is measured:
how far plans hold is what `benchmarks.memory` asks.
"""

from bisect import bisect_left
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.options import comma_counts
from paceline.planning.dimensions import read_dimensions
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

MOST_CHATS = 1 << 14
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
        counts = range(1, MOST_CHATS + 1)
        return max(
            bisect_left(counts, True, key=lambda count: self.total_bytes(count, chunk) > budget_bytes)
            for chunk in CHUNKS
        )

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


def main(memory_mib: str = "64,128,256", tokens: str = "128,512", draft_count: int = 5) -> None:
    """Print a table of chats by memory and tokens of a chat."""
    pair = Pair(read_dimensions("builtin:target"), read_dimensions("builtin:draft"))
    table = Table("MiB", "tokens", "int8 weights", "planned", *(f"1:{ratio}" for ratio in RATIOS))
    for budget in comma_counts("--memory-mib", memory_mib):
        for token_count in comma_counts("--tokens", tokens):
            chats = fitting(pair, token_count, draft_count, budget * MIB)
            fixed = [str(chats.with_ratio(ratio, budget * MIB)) for ratio in RATIOS]
            table.add_row(str(budget), str(token_count), chats.int8, str(chats.planned(budget * MIB)), *fixed)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    typer.run(main)
