"""Many batches of calls and connections, drawn by hypothesis, against one arena."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzzing.arena import Arena, arena
from tests.fuzzing.calls import METHODS, Call, calls
from tests.fuzzing.connections import streams
from tests.fuzzing.drawing import for_each

BATCHES = 100
"""Batches of calls drawn from one seed."""
BATCHES_BETWEEN_CHECKS = 5
CONNECTION_BATCHES = 10


@contextmanager
def running_arena() -> Iterator[tuple[asyncio.Runner, Arena]]:
    """Yield a runner and an arena whose loop runs only during a call, because hypothesis calls plain functions."""
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder:
        stack = AsyncExitStack()
        attacked = runner.run(stack.enter_async_context(arena(Path(folder))))
        try:
            yield runner, attacked
        finally:
            runner.run(stack.aclose())


def attack_until(
    runner: asyncio.Runner,
    attacked: Arena,
    input_count: int,
    first_seed: int,
    connection_batches: int = CONNECTION_BATCHES,
) -> None:
    """Attack until the calls number `input_count` and cover all methods, with broken connections between.

    Raise Unsound at the first failure.
    """
    batch_count = 0

    def is_enough() -> bool:
        return attacked.input_count >= input_count and attacked.called >= {method.name for method in METHODS}

    def send(batch: tuple[list[Call], bool]) -> None:
        nonlocal batch_count
        if not is_enough():
            batch_count += 1
            runner.run(attacked.attack(batch[0], at_once=batch[1]))
            if batch_count % BATCHES_BETWEEN_CHECKS == 0:
                runner.run(attacked.check())

    batches = st.tuples(st.lists(calls(), min_size=5, max_size=20), st.booleans())
    contents = st.lists(streams(attacked.recorded), min_size=1, max_size=5)
    chosen_seed = first_seed
    while not is_enough():
        for_each(contents, connection_batches, chosen_seed, lambda batch: runner.run(attacked.disturb(batch)))
        for_each(batches, BATCHES, chosen_seed, send)
        runner.run(attacked.check())
        chosen_seed += 1
