"""Branches of a cached sequence: they read what it holds, leave it as it is, and live in what nobody needs."""

import pytest

from paceline.engine.cache.paged import KvPool
from paceline.errors import CacheFull
from tests.caches import PAGE_BYTES, PAGE_TOKENS, fill, pool_of, run_pass

PROMPT = [1, 2, 3, 4, 5, 6]


def grow(pool: KvPool, sequence_id: str, token_ids: list[int]) -> None:
    """Compute tokens after those that a sequence has, and compare with attention over plain tokens."""
    whole = [*pool.token_ids(sequence_id), *token_ids]
    pool.append(sequence_id, token_ids)
    run_pass(pool, {sequence_id: (whole, len(token_ids))})
    pool.seal(sequence_id, len(whole))


@pytest.mark.parametrize("length", range(1, len(PROMPT) + 1))
def test_a_branch_and_its_parent_go_on_apart(length: int) -> None:
    pool = pool_of(20)
    fill(pool, "a", PROMPT)
    pool.fork("a", length, "branch")
    grow(pool, "branch", [7, 8, 9])
    grow(pool, "a", [9, 9])
    pool.fork("branch", length + 2, "twig")
    grow(pool, "twig", [4])
    grow(pool, "branch", [5, 6])
    assert pool.token_ids("twig") == [*PROMPT[:length], 7, 8, 4]
    assert pool.token_ids("a") == [*PROMPT, 9, 9]


@pytest.mark.parametrize("base_length", [3, 4, 6])
def test_a_sequence_adopts_what_a_branch_computed_and_keeps_its_own_pages(base_length: int) -> None:
    pool = pool_of(20)
    fill(pool, "a", PROMPT)
    pages = list(pool.pages("a"))
    pool.fork("a", base_length, "branch")
    grow(pool, "branch", [7, 8, 9, 7, 8])
    assert pool.adopt("a", base_length, "branch", base_length + 4)
    pool.release("branch")
    assert pool.token_ids("a") == [*PROMPT[:base_length], 7, 8, 9, 7]
    assert pool.pages("a")[: len(pages)] == pages
    grow(pool, "a", [2])


def test_branches_are_not_counted_and_no_prompt_takes_them_over() -> None:
    pool = pool_of(20)
    fill(pool, "a", PROMPT)
    pool.fork("a", 6, "branch")
    grow(pool, "branch", [7] * 6)
    assert pool.sequence_count == 1
    assert fill(pool, "b", [*PROMPT, *[7] * 6]) == PAGE_TOKENS


@pytest.mark.parametrize("cut_length", [6, 3, 0])
def test_what_branches_alone_hold_is_not_used(cut_length: int) -> None:
    """A branch keeps the pages that its sequence gave up, also those that the index knows."""
    pool = pool_of(20)
    fill(pool, "a", PROMPT)
    pool.fork("a", 6, "branch")
    pool.fork("branch", 5, "twig")
    grow(pool, "branch", [7] * 6)
    pool.truncate("a", cut_length)
    used_bytes = -(-cut_length // PAGE_TOKENS) * PAGE_BYTES
    assert pool.describe().used_bytes == pool.held_bytes == used_bytes
    for branch_id in ("branch", "twig"):
        pool.release(branch_id)
    assert pool.held_bytes == used_bytes


def test_branches_go_before_pages_that_are_kept_for_later_prompts() -> None:
    pool = pool_of(10)
    fill(pool, "old", [9] * 8)
    pool.release("old")
    fill(pool, "a", PROMPT)
    for branch_id in ("first", "second", "third"):
        pool.fork("a", 6, branch_id)
        grow(pool, branch_id, [7, 8])
    idle_bytes = pool.describe().idle_bytes
    fill(pool, "b", [3] * 16)
    assert pool.describe().idle_bytes == idle_bytes
    assert [pool.length(one) for one in ("a", "b", "first", "second", "third")] == [6, 16, 0, 8, 8]


def test_a_branch_takes_free_pages_only() -> None:
    pool = pool_of(4)
    fill(pool, "old", [9] * 8)
    pool.release("old")
    fill(pool, "a", PROMPT[:4])
    pool.fork("a", 4, "branch")
    pool.append("branch", [7] * 4)
    with pytest.raises(CacheFull):
        pool.append("branch", [7])
    with pytest.raises(CacheFull):
        pool.fork("a", 3, "other")
    assert pool.length("branch") == 8
    assert pool.length("other") == 0
    assert pool.describe().idle_bytes == 2 * PAGE_BYTES


def test_a_branch_copies_a_page_that_it_shares_into_a_free_one_only() -> None:
    pool = pool_of(4)
    fill(pool, "old", [9] * 8)
    pool.release("old")
    fill(pool, "a", [*PROMPT, 7, 8])
    pool.fork("a", 8, "branch")
    pool.truncate("branch", 7)
    with pytest.raises(CacheFull):
        pool.append("branch", [5])
    assert pool.describe().idle_bytes == 2 * PAGE_BYTES
    assert pool.length("branch") == 7


def test_a_branch_whose_pages_are_needed_for_adopting_it_is_gone() -> None:
    pool = pool_of(2)
    fill(pool, "a", PROMPT[:4])
    pool.fork("a", 4, "branch")
    grow(pool, "branch", [7])
    assert not pool.adopt("a", 4, "branch", 5)
    assert pool.token_ids("a") == PROMPT[:4]
    assert not pool.adopt("a", 4, "branch", 5)
