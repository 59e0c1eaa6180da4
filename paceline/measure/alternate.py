"""Run systems in turn, so that whatever the machine does meanwhile happens to all of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from paceline.measure.system import Measured, System

Key = TypeVar("Key")
WARM_UP = 0
"""The number of the run that is not timed."""


async def alternate(
    systems: Mapping[Key, System],
    prompts: Sequence[tuple[int, ...]],
    run_count: int,
    record: Callable[[Key, int, Measured], None],
) -> None:
    """Warm every system up, then run all of them `run_count` times in turn.

    `record` gets each pass when it has ended, so an interruption loses only the one under way.
    """
    for number in range(WARM_UP, run_count + 1):
        for key, system in systems.items():
            record(key, number, await system.run(prompts))
