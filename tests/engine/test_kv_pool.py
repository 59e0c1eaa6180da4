"""The paged layout: which pages sequences share, keep and copy."""

from typing import Any

import pytest

from paceline.errors import Overloaded
from tests.caches import PAGE_BYTES, fill, pool_of, run_pass


def test_equal_prompts_hold_one_copy_and_are_computed_once() -> None:
    pool = pool_of(100)
    prompt = [n % 7 for n in range(32)]
    assert [fill(pool, sequence_id, [*prompt, n]) for n, sequence_id in enumerate("abcdefgh")] == [0] + [32] * 7
    cache = pool.describe()
    assert cache.used_bytes == (8 + 8) * PAGE_BYTES
    assert cache.shared_token_count == 7 * 32
    assert cache.prefix_sharing


def test_callers_that_are_kept_apart_share_no_page() -> None:
    pool = pool_of(100)
    prompt = [n % 7 for n in range(32)]
    ids = ("one/a", "other/a", "one/b", "a", "other/b")
    assert [fill(pool, sequence_id, [*prompt, 1]) for sequence_id in ids] == [0, 0, 32, 0, 32]


def test_a_finished_prompt_stays_until_memory_is_wanted_and_the_least_recently_used_goes_first() -> None:
    pool = pool_of(16)
    first, second = [1] * 24, [2] * 24
    for sequence_id, prompt in (("a", first), ("b", second)):
        fill(pool, sequence_id, prompt)
        pool.release(sequence_id)
    assert pool.describe().idle_bytes == 12 * PAGE_BYTES
    assert fill(pool, "c", first) == 20
    pool.release("c")
    fill(pool, "d", [3] * 32)
    pool.release("d")
    assert fill(pool, "e", first) == 20
    assert fill(pool, "f", second) < 20


def test_a_conversation_stays_while_pages_are_free_whoever_else_has_its_beginning() -> None:
    """The next one took the idle pages behind the common beginning, and so the first was computed again."""
    pool = pool_of(100)
    system = [n % 7 for n in range(16)]
    talks = [[*system, *[number] * 12] for number in range(10, 14)]
    for talk in talks:
        fill(pool, "turn", talk)
        pool.release("turn")
    for talk in talks:
        assert fill(pool, "next turn", [*talk, 1, 2]) == len(talk)
        pool.release("next turn")


def test_a_sequence_cut_within_a_shared_page_goes_on_in_a_page_of_its_own() -> None:
    pool = pool_of(20)
    prompt = [n % 7 for n in range(8)]
    fill(pool, "a", [*prompt, 1])
    fill(pool, "b", [*prompt, 1])
    pool.keep("b", 6, ())
    pool.append("b", [3])
    run_pass(pool, {"b": ([*prompt[:6], 3], 1)})
    pool.append("a", [2])
    run_pass(pool, {"a": ([*prompt, 1, 2], 1)})
    assert fill(pool, "c", [*prompt, 5]) == len(prompt)


def test_without_sharing_nothing_is_kept_or_taken_over() -> None:
    pool = pool_of(16, prefix_sharing=False)
    assert fill(pool, "a", [1] * 20) == fill(pool, "b", [1] * 20) == 0
    pool.release("a")
    assert pool.describe().idle_bytes == 0
    assert not pool.describe().prefix_sharing


def test_a_full_pool_says_what_is_missing_and_keeps_what_it_has() -> None:
    pool = pool_of(4)
    fill(pool, "a", [1] * 10)
    with pytest.raises(
        Overloaded, match=f"{6 * PAGE_BYTES} more bytes are needed, {3 * PAGE_BYTES} of {4 * PAGE_BYTES}"
    ):
        fill(pool, "b", [2] * 21)
    assert pool.length("a") == 10
    assert pool.sequence_count == 1


class Watched(tuple[int, ...]):
    """A prompt that counts the tokens copied out of it."""

    copied_count = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.copied_count += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.review
def test_taking_over_a_cached_prompt_costs_as_much_as_it_is_long() -> None:
    """Review B10: the cost was quadratic, 1.24 s for 131,072 tokens."""
    pool = pool_of(2000)
    prompt = [n % 7 for n in range(4 * 1000)]
    pool.keep("a", 0, ())
    pool.append("a", prompt)
    pool.seal("a", len(prompt))
    watched = Watched(prompt)
    assert pool.keep("b", 0, watched) == len(prompt)
    assert watched.copied_count <= 2 * len(prompt)


def test_truncation_and_regrowth_within_a_page_copy_nothing() -> None:
    pool = pool_of(40)
    fill(pool, "a", [5] * 50)
    pages = list(pool._sequences["a"].pages)
    pool.truncate("a", 46)
    pool.keep("a", 45, ())
    pool.append("a", [6] * 5)
    assert pool._sequences["a"].pages == pages
