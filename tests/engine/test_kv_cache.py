"""The caches of every layout against plain lists of tokens: attention reads exactly the sequence's tokens."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.engine.attention import short as short_attention
from paceline.engine.attention.strict import StrictAttention
from paceline.engine.cache.dense import DenseCache
from paceline.engine.cache.paged import KvPool
from paceline.engine.interfaces import KvCache, Span
from paceline.errors import Overloaded, PacelineError, PrefixNotCached, SequenceNotFound
from tests.caches import HEAD_COUNT, PAGE_BYTES, PAGE_TOKENS, SHAPE, fill, pool_of, run_pass

IDS = st.sampled_from("abcde")
# Few different tokens, so that prefixes are often equal.
TOKENS = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=14).map(tuple)


class CacheMachine(RuleBasedStateMachine):
    """Serves rows as the runner does, several in a pass."""

    def make(self) -> KvCache:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = self.make()
        self.truth: dict[str, list[int]] = {}

    @rule(
        rows=st.dictionaries(IDS, st.tuples(st.integers(0, 30), TOKENS), min_size=1, max_size=4),
        draft_count=st.integers(0, 3),
    )
    def serve(self, rows: dict[str, tuple[int, tuple[int, ...]]], draft_count: int) -> None:
        running: dict[str, tuple[list[int], int]] = {}
        for sequence_id, (wish, token_ids) in rows.items():
            cached = self.truth.get(sequence_id, [])
            base_length = min(wish, len(cached))
            kept = self.cache.keep(sequence_id, base_length, token_ids[:-1])
            assert base_length <= kept < base_length + len(token_ids)
            new = token_ids[kept - base_length :]
            whole = [*cached[:base_length], *token_ids]
            try:
                self.cache.append(sequence_id, new)
            except Overloaded:
                self.truth[sequence_id] = whole[:kept]
                if not kept:
                    del self.truth[sequence_id]
                continue
            self.truth[sequence_id] = whole
            running[sequence_id] = whole, len(new)
        if running:
            run_pass(self.cache, running)
        for sequence_id, (whole, _) in running.items():
            self.cache.seal(sequence_id, max(0, len(whole) - draft_count))

    @rule(sequence_id=IDS, beyond=st.integers(1, 5))
    def relying_on_more_than_is_cached_changes_nothing(self, sequence_id: str, beyond: int) -> None:
        with pytest.raises(PrefixNotCached):
            self.cache.keep(sequence_id, len(self.truth.get(sequence_id, [])) + beyond, (1,))

    @rule(sequence_id=IDS, length=st.integers(0, 40))
    def truncate(self, sequence_id: str, length: int) -> None:
        cached = self.truth.get(sequence_id)
        try:
            self.cache.truncate(sequence_id, length)
        except PacelineError as error:
            assert isinstance(error, SequenceNotFound if cached is None else PrefixNotCached)
            assert cached is None or length > len(cached)
            return
        assert cached is not None
        del cached[length:]

    @rule(sequence_id=IDS)
    def release(self, sequence_id: str) -> None:
        assert self.cache.release(sequence_id) == (self.truth.pop(sequence_id, None) is not None)

    @invariant()
    def lengths_agree(self) -> None:
        assert self.cache.sequence_count == len(self.truth)
        for sequence_id in "abcde":
            assert self.cache.length(sequence_id) == len(self.truth.get(sequence_id, []))


class PagedMachine(CacheMachine):
    def make(self) -> KvCache:
        return pool_of(12)

    @invariant()
    def no_page_leaks_and_none_is_shared_unseen(self) -> None:
        pool = self.cache
        tables = Counter(page for sequence in pool._sequences.values() for page in sequence.pages)
        for page in range(12):
            assert pool._pages.references(page) == tables[page] + pool._index.holds(page)
            assert (page in pool._index._idle) == (pool._index.holds(page) and not tables[page])
        for sequence in pool._sequences.values():
            assert len(sequence.pages) == -(-sequence.length // PAGE_TOKENS)
            assert len(set(sequence.pages)) == len(sequence.pages)
        used = pool.describe()
        assert used.used_bytes == len(tables) * PAGE_BYTES
        assert used.used_bytes + used.idle_bytes + pool._pages.free_count * PAGE_BYTES == used.capacity_bytes


class OutgrowingMachine(PagedMachine):
    """Sequences grow beyond the attention for short rows."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(short_attention, "MAX_LENGTH", 8)
        super().__init__()

    def teardown(self) -> None:
        self._patch.undo()


class DenseMachine(CacheMachine):
    def make(self) -> KvCache:
        return DenseCache(SHAPE, 2 * 4 * 110 * SHAPE.token_bytes)

    @invariant()
    def nothing_is_held_without_sequences(self) -> None:
        assert self.truth or not self.cache.describe().used_bytes


TestPaged = PagedMachine.TestCase
TestOutgrowing = OutgrowingMachine.TestCase
TestDense = DenseMachine.TestCase
TestPaged.settings = settings(max_examples=40, stateful_step_count=20)
TestOutgrowing.settings = settings(max_examples=25, stateful_step_count=20)
TestDense.settings = settings(max_examples=25, stateful_step_count=15)


def strict(page_count: int) -> KvPool:
    return pool_of(page_count, attention=StrictAttention)


def dense(page_count: int) -> DenseCache:
    return DenseCache(SHAPE, 1 << 20)


def attended_rows(cache: KvCache, base_length: int, count: int, planted: tuple[str, float] | None) -> torch.Tensor:
    """Return attention [H, count + 2, D] of row a's `count` new tokens, then row b's two; a's second is planted."""
    generator = torch.Generator().manual_seed(3)
    fill(cache, "z", [1] * 8 + [2] * 5)
    kept = cache.keep("a", 0, [1] * base_length)
    if kept < base_length:
        cache.append("a", [1] * (base_length - kept))
        run_pass(cache, {"a": ([1] * base_length, base_length - kept)})
    fill(cache, "b", [4])
    cache.append("a", [3] * count)
    cache.append("b", [5] * 2)
    spans = [Span("a", 0, count, base_length + count), Span("b", count, count + 2, 3)]
    query, key, value = (
        torch.randn(heads, count + 2, SHAPE.head_size, generator=generator)
        for heads in (HEAD_COUNT, SHAPE.kv_head_count, SHAPE.kv_head_count)
    )
    if planted:
        part, number = planted
        {"key": key, "value": value}[part][0, 1, 2] = number
    return cache.attention(spans).attend(0, query, key, value, 0.5)


@pytest.mark.review
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize(
    ("base_length", "count", "page_count"),
    [(9, 4, 20), (5, 20, 20), (0, 20, 20), (8, 16, 11)],
    ids=["drafts", "chunk", "prompt", "segments"],
)
@pytest.mark.parametrize("make", [pool_of, strict, dense])
def test_what_is_not_finite_reaches_no_earlier_token_and_no_other_row(
    make: Callable[[int], KvCache], base_length: int, count: int, page_count: int, part: str, number: float
) -> None:
    """Review B3: a weight of 0 does not hide an infinity."""
    expected = attended_rows(make(page_count), base_length, count, None)
    found = attended_rows(make(page_count), base_length, count, (part, number))
    others = [0, count, count + 1]
    assert torch.equal(found[:, others], expected[:, others])
    assert not found[:, 1].isfinite().all(), "the token itself is as wrong as it was"
