"""Drawing many values of a strategy from a seed, for other loops than hypothesis' own."""

from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Drawn = TypeVar("Drawn")


def for_each(strategy: st.SearchStrategy[Drawn], count: int, chosen_seed: int, use: Callable[[Drawn], None]) -> None:
    """Draw `count` values from one seed; stop at the first use that raises."""
    problems: list[Exception] = []

    @seed(chosen_seed)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(strategy)
    def draw(drawn: Drawn) -> None:
        # Hidden from hypothesis, which would repeat it on services that it may have harmed.
        if not problems:
            try:
                use(drawn)
            except Exception as problem:
                problems.append(problem)

    draw()
    if problems:
        raise problems[0]
