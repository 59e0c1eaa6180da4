"""Chats within a memory: as many as fit, and no fewer than a fixed cache would serve."""

import pytest

from benchmarks.chats import MOST_CHATS, RATIOS, Chats, fitting
from paceline.planning.memory import MIB
from paceline.planning.search import CHUNKS
from tests.planning.pairs import BUILTIN, LARGE

LENGTHS = (128, 512)


@pytest.mark.parametrize("budget_mib", [48, 64, 128, 256])
@pytest.mark.parametrize("token_count", LENGTHS)
def test_as_many_chats_are_planned_as_fit(budget_mib: int, token_count: int) -> None:
    chats, budget = fitting(BUILTIN, token_count, 5, budget_mib * MIB), budget_mib * MIB
    count = chats.planned(budget)
    assert min(chats.total_bytes(count + 1, chunk) for chunk in CHUNKS) > budget
    assert not count or min(chats.total_bytes(count, chunk) for chunk in CHUNKS) <= budget


@pytest.mark.parametrize("budget_mib", [64, 128, 256, MOST_CHATS])
def test_a_fixed_cache_serves_no_more_than_the_plan(budget_mib: int) -> None:
    for token_count in LENGTHS:
        chats = fitting(BUILTIN, token_count, 5, budget_mib * MIB)
        assert max(chats.with_ratio(ratio, budget_mib * MIB) for ratio in RATIOS) <= chats.planned(budget_mib * MIB)


def test_a_fixed_cache_that_does_not_fit_serves_none() -> None:
    assert not Chats(LARGE, 128, 5, "none").with_ratio(2, 18_000 * MIB)
    assert Chats(LARGE, 128, 5, "none").with_ratio(15, 24_000 * MIB)


def test_weights_become_int8_only_where_nothing_fits_else() -> None:
    assert [fitting(BUILTIN, 128, 5, mib * MIB).int8 for mib in (128, 64)] == ["none", "both"]
