"""What heads gain where they are served: tokens a second beside plain decoding and the draft service, by batch size.

One lane for all systems, so that the batch size is the number of generations at once, as in the paper. Nothing drafts
but what a system is named after: no text that repeats. `auto` learns for some hundred rounds before it is timed, which
a warm-up pass of one size does not have.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter

from paceline.measure.alternate import timed_passes
from paceline.measure.cluster import ClusterSystem, running_system
from paceline.measure.contention import Contention, MachineWatch, counting, was_quiet
from paceline.measure.rounds import RoundUse
from paceline.measure.source_sets import ALL_SOURCES, SourceSet
from paceline.measure.system import Measured
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.variables import NO_DRAFT, NO_HEADS
from paceline.types import DraftSource

PLAIN, SERVICE, BOTH = "plain", "draft service", "both, auto"
"""Systems beside one for each kind of heads."""
SERVICE_DRAFT_COUNT = "5"
LEAST_PROMPTS = 8
LEARNING_ROUNDS = 300
"""Rounds of `auto` that are not timed."""


@dataclass(frozen=True)
class ServedRun:
    tokens_per_s: float
    tokens_per_row: float
    acceptance: float | None
    equal_count: int
    """Outputs equal to those of plain decoding in its first run."""
    contention: Contention | None


@dataclass(frozen=True)
class Served:
    """One system at one batch size."""

    system: str
    batch_size: int
    prompt_count: int
    runs: tuple[ServedRun, ...]

    @property
    def tokens_per_s(self) -> float:
        return median(run.tokens_per_s for run in counting(self.runs))

    @property
    def extra_tokens(self) -> float:
        """Tokens a round and generation beyond the target's own."""
        return median(run.tokens_per_row for run in counting(self.runs)) - 1

    @property
    def equal_count(self) -> int:
        return min(run.equal_count for run in self.runs)

    @property
    def quiet_count(self) -> int:
        return sum(map(was_quiet, self.runs))


Results = TypeAdapter(list[Served])


def systems_at(
    pair: ClusterOptions, batch_size: int, heads: Mapping[str, Path], draft_count: int
) -> dict[str, ClusterOptions]:
    """Return the options of each system; the last has the draft service and the first of the heads."""
    base = replace(pair, batch_size=batch_size, lanes=1, prefix_sharing=False, kv_memory="256MiB")
    alone = replace(base, draft_model=NO_DRAFT)
    kinds = {name: replace(alone, heads=str(folder), draft_count=str(draft_count)) for name, folder in heads.items()}
    both = replace(base, heads=str(next(iter(heads.values()), NO_HEADS)), draft_count="auto")
    return {
        PLAIN: replace(alone, draft_count="0"),
        SERVICE: replace(base, draft_count=SERVICE_DRAFT_COUNT),
        **kinds,
        BOTH: both,
    }


def sources_of(system: str) -> SourceSet:
    """Return what may draft in a system."""
    service, heads = DraftSource.DRAFT, DraftSource.HEADS
    return {PLAIN: ALL_SOURCES, SERVICE: (service,), BOTH: (service, heads)}.get(system, (heads,))


async def measure(
    systems: Mapping[str, ClusterOptions],
    prompts: Sequence[tuple[int, ...]],
    *,
    run_count: int,
    max_new_tokens: int,
    report: Callable[[str], None],
) -> list[Served]:
    """Run the systems of one batch size in turn."""
    batch_size = next(iter(systems.values())).batch_size or 1
    own = prompts[: max(LEAST_PROMPTS, 2 * batch_size)]
    async with AsyncExitStack() as stack:
        running: dict[str, ClusterSystem] = {}
        for name, options in systems.items():
            system = running_system(options, max_new_tokens, sources=sources_of(name))
            running[name] = await stack.enter_async_context(system)
        report(f"B = {batch_size}: {len(own)} prompts")
        await _let_learn(running[BOTH], own)
        measured = await timed_passes(running, own, run_count, MachineWatch())
    expected = measured[PLAIN][0].outputs
    return [
        Served(name, batch_size, len(own), tuple(_run(one, expected) for one in passes))
        for name, passes in measured.items()
    ]


async def _let_learn(system: ClusterSystem, prompts: Sequence[tuple[int, ...]]) -> None:
    round_count = 0
    while round_count < LEARNING_ROUNDS:
        rounds = (await system.run(prompts)).rounds
        assert rounds
        round_count += rounds.round_count


def _run(measured: Measured, expected: Sequence[Sequence[int]]) -> ServedRun:
    rounds = measured.rounds or RoundUse()
    equal_count = sum(one == other for one, other in zip(measured.outputs, expected, strict=True))
    return ServedRun(measured.tokens_per_s, rounds.tokens_per_row, rounds.acceptance, equal_count, measured.contention)
