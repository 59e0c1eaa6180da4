"""Whether served heads change an output: every prompt beside plain decoding, greedy and sampled.

Nothing but heads drafts. Plain decoding runs once for each precision.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from paceline.client import Client
from paceline.measure.cluster import ClusterSystem
from paceline.measure.equivalence.precision import Precision, with_precision
from paceline.measure.rounds import RoundUse
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from paceline.process.variables import NO_DRAFT
from paceline.types import DraftSource, SamplingParameters

PLAIN_BATCH_SIZE = 8
TEMPERATURES = (0.0, 0.8)
Outputs = list[list[int]]


@dataclass(frozen=True)
class Exactness:
    """Of one kind at one batch size, in one precision and at one temperature."""

    kind: str
    precision: str
    batch_size: int
    temperature: float
    prompt_count: int
    equal_count: int
    extra_tokens: float
    """Accepted drafts a round: outputs without any would be equal too."""

    @property
    def case(self) -> tuple[object, ...]:
        return self.kind, self.precision, self.batch_size, self.temperature


Results = TypeAdapter(list[Exactness])


async def compare(
    pair: ClusterOptions,
    precision: Precision,
    heads: Mapping[str, Path],
    prompts: Sequence[tuple[int, ...]],
    *,
    draft_count: int,
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    report: Callable[[Exactness], None],
) -> None:
    """Compare the kinds of heads with plain decoding; `report` gets each result as it comes."""
    alone = with_precision(replace(pair, draft_model=NO_DRAFT), precision, "continuous")
    plain = replace(alone, batch_size=PLAIN_BATCH_SIZE, draft_count="0")
    async with _systems(plain, max_new_tokens) as systems:
        expected = {one: (await system.run(prompts)).outputs for one, system in systems.items()}
    for kind, folder in heads.items():
        for size in batch_sizes:
            options = replace(alone, heads=str(folder), draft_count=str(draft_count), batch_size=size)
            async with _systems(options, max_new_tokens) as systems:
                for temperature, system in systems.items():
                    measured = await system.run(prompts)
                    equal_count = sum(map(list.__eq__, measured.outputs, expected[temperature]))
                    extra_tokens = (measured.rounds or RoundUse()).tokens_per_row - 1
                    made = (kind, str(precision), size, temperature, len(prompts), equal_count, extra_tokens)
                    report(Exactness(*made))


@asynccontextmanager
async def _systems(options: ClusterOptions, max_new_tokens: int) -> AsyncIterator[dict[float, ClusterSystem]]:
    """Run services while the block runs, and ask them at each temperature."""
    async with running_cluster(options) as addresses, Client(addresses.coordinator) as client:
        yield {
            temperature: ClusterSystem(
                client,
                addresses,
                max_new_tokens,
                sources=(DraftSource.HEADS,),
                sampling=SamplingParameters(temperature=temperature),
            )
            for temperature in TEMPERATURES
        }
