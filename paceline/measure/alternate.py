"""Runs of systems in turn, so that changes of the machine affect all of them; disturbed passes are repeated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar

from paceline.measure.contention import Watch, counting
from paceline.measure.system import Measured, System

Key = TypeVar("Key")
WARM_UP = 0
"""Number of the run that is not timed."""
MAX_REPEATS = 2
"""Most repeats of one run. On a machine that stays busy the last one is kept, marked as not quiet."""


async def alternate(
    systems: Mapping[Key, System],
    prompts: Sequence[tuple[int, ...]],
    run_count: int,
    record: Callable[[Key, int, Measured], None],
    watch: Watch,
    repeats: int = MAX_REPEATS,
) -> None:
    """Warm every system up, then run all of them `run_count` times in turn.

    `record` gets each pass when it ends, so an interruption loses only the pass under way. `watch` tells which passes
    count; one that was disturbed is repeated up to `repeats` times. Everything compared must share one watch, because
    it learns how fast the machine can be.
    """
    for number in range(WARM_UP, run_count + 1):
        for key, system in systems.items():
            record(key, number, await undisturbed(system, prompts, watch, 0 if number == WARM_UP else repeats))


async def timed_passes(
    systems: Mapping[Key, System], prompts: Sequence[tuple[int, ...]], run_count: int, watch: Watch
) -> dict[Key, list[Measured]]:
    """Run systems as `alternate` does; return the timed passes of each."""
    passes: dict[Key, list[Measured]] = {key: [] for key in systems}

    def record(key: Key, number: int, measured: Measured) -> None:
        if number != WARM_UP:
            passes[key].append(measured)

    await alternate(systems, prompts, run_count, record, watch)
    return passes


def median_tokens_per_s(passes: Sequence[Measured]) -> float:
    return median(one.tokens_per_s for one in counting(passes))


def equal_count(passes: Sequence[Measured], outputs: Sequence[Sequence[int]]) -> int:
    """Return how many prompts have these outputs in each of the passes."""
    return sum(all(one.outputs[place] == output for one in passes) for place, output in enumerate(outputs))


async def undisturbed(
    system: System, prompts: Sequence[tuple[int, ...]], watch: Watch, repeats: int = MAX_REPEATS
) -> Measured:
    """Return the first pass that nothing disturbed; when all were disturbed, the last."""
    while True:
        began = watch.begin()
        measured = await system.run(prompts)
        contention = watch.since(began)
        if contention.is_quiet or not repeats:
            return replace(measured, contention=contention)
        repeats -= 1
