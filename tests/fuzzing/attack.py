"""Many batches of calls, drawn by hypothesis, against one arena."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzzing.arena import Arena, Unsound, arena
from tests.fuzzing.calls import Call, calls

EXAMPLES = 100
"""Batches drawn from one seed."""
BATCHES_BETWEEN_CHECKS = 5

_SETTINGS = settings(
    max_examples=EXAMPLES,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
_BATCHES = st.lists(calls(), min_size=5, max_size=20)


@contextmanager
def running_arena() -> Iterator[tuple[asyncio.Runner, Arena]]:
    """Hypothesis calls plain functions, so the arena's loop runs only while one of them waits for it."""
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder:
        stack = AsyncExitStack()
        attacked = runner.run(stack.enter_async_context(arena(Path(folder))))
        try:
            yield runner, attacked
        finally:
            runner.run(stack.aclose())


def attack_until(runner: asyncio.Runner, attacked: Arena, input_count: int, first_seed: int) -> None:
    """Attack until so many calls were made; Unsound at the first thing that is wrong."""
    chosen_seed = first_seed
    while attacked.input_count < input_count:
        _attack(runner, attacked, input_count, chosen_seed)
        runner.run(attacked.check())
        chosen_seed += 1


def _attack(runner: asyncio.Runner, attacked: Arena, input_count: int, chosen_seed: int) -> None:
    batch_count = 0
    problems: list[Unsound] = []

    @seed(chosen_seed)
    @_SETTINGS
    @given(batch=_BATCHES, at_once=st.booleans())
    def attack(batch: list[Call], at_once: bool) -> None:
        nonlocal batch_count
        # Kept from hypothesis, which would try it again: on services that it may have harmed.
        if problems or attacked.input_count >= input_count:
            return
        batch_count += 1
        try:
            runner.run(attacked.attack(batch, at_once=at_once))
            if batch_count % BATCHES_BETWEEN_CHECKS == 0:
                runner.run(attacked.check())
        except Unsound as problem:
            problems.append(problem)

    attack()
    if problems:
        raise problems[0]
