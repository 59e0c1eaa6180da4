"""The caches of every layout against plain lists of tokens: what attention reads is what the sequence is."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.engine import short_attention
from paceline.engine.dense_cache import DenseCache
from paceline.engine.kv_cache import KvCache, KvShape, Span
from paceline.engine.kv_pool import KvPool
from paceline.errors import Overloaded, PacelineError, PrefixNotCached, SequenceNotFound

HEAD_COUNT = 4
SHAPE = KvShape(2, HEAD_COUNT, 2, 4, torch.float32, torch.device("cpu"))
PAGE_TOKENS = 4
PAGE_BYTES = PAGE_TOKENS * SHAPE.token_bytes
IDS = st.sampled_from("abcde")
# Few different tokens, so that beginnings are often equal.
TOKENS = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=14).map(tuple)


def vectors(prefix: Sequence[int], purpose: str) -> torch.Tensor:
    """A made-up model: keys or values of the last token of a prefix, in all layers: [layers, KV heads, D]."""
    numbers = random.Random(f"{purpose}{tuple(prefix)}")
    values = [numbers.gauss(0, 1) for _ in range(SHAPE.layer_count * SHAPE.kv_head_count * SHAPE.head_size)]
    return torch.tensor(values).view(SHAPE.layer_count, SHAPE.kv_head_count, SHAPE.head_size)


def content(token_ids: Sequence[int], purpose: str) -> torch.Tensor:
    """[layers, KV heads, tokens, D]"""
    return torch.stack([vectors(token_ids[: stop + 1], purpose) for stop in range(len(token_ids))], dim=2)


def run_pass(cache: KvCache, rows: dict[str, tuple[list[int], int]]) -> None:
    """Attend for the last `count` tokens of each row's sequence and compare with attention over the plain tokens."""
    spans, keys, values, start = [], [], [], 0
    for sequence_id, (token_ids, count) in rows.items():
        spans.append(Span(sequence_id, start, start + count, len(token_ids)))
        keys.append(content(token_ids, "key"))
        values.append(content(token_ids, "value"))
        start += count
    query = torch.randn(HEAD_COUNT, start, SHAPE.head_size)
    attention = cache.attention(spans)
    for layer in range(SHAPE.layer_count):
        new = [
            torch.cat([one[layer][:, -span.count :] for one, span in zip(kind, spans, strict=True)], 1)
            for kind in (keys, values)
        ]
        attended = attention.attend(layer, query, new[0], new[1], 0.5)
        for span, own_keys, own_values in zip(spans, keys, values, strict=True):
            mask = torch.ones(span.count, span.length, dtype=torch.bool).tril(span.base_length)
            expected = F.scaled_dot_product_attention(
                query[None, :, span.start : span.stop],
                own_keys[None, layer],
                own_values[None, layer],
                attn_mask=mask,
                scale=0.5,
                enable_gqa=True,
            )[0]
            torch.testing.assert_close(attended[:, span.start : span.stop], expected, rtol=1e-4, atol=1e-5)


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
        return KvPool(SHAPE, 12 * PAGE_BYTES, page_tokens=PAGE_TOKENS)

    @invariant()
    def no_page_leaks_and_none_is_shared_unseen(self) -> None:
        pool = self.cache
        tables = Counter(page for sequence in pool._sequences.values() for page in sequence.pages)
        for page in range(12):
            assert pool._pages.references(page) == tables[page] + pool._index.holds(page)
            assert pool._index.is_idle(page) == (pool._index.holds(page) and not tables[page])
        for sequence in pool._sequences.values():
            assert len(sequence.pages) == -(-sequence.length // PAGE_TOKENS)
            assert len(set(sequence.pages)) == len(sequence.pages)
        used = pool.describe()
        assert used.used_bytes == len(tables) * PAGE_BYTES
        assert used.used_bytes + used.idle_bytes + pool._pages.free_count * PAGE_BYTES == used.capacity_bytes


class OutgrowingMachine(PagedMachine):
    """Sequences grow out of what short rows' own attention is for."""

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
TestPaged.settings = settings(max_examples=120, stateful_step_count=20)
TestOutgrowing.settings = settings(max_examples=60, stateful_step_count=20)
TestDense.settings = settings(max_examples=60, stateful_step_count=15)


def fill(pool: KvCache, sequence_id: str, token_ids: Sequence[int]) -> int:
    """Serve a whole prompt; return how many of its tokens were taken over."""
    kept = pool.keep(sequence_id, 0, token_ids[:-1])
    pool.append(sequence_id, token_ids[kept:])
    run_pass(pool, {sequence_id: (list(token_ids), len(token_ids) - kept)})
    pool.seal(sequence_id, len(token_ids))
    return kept


def test_equal_prompts_hold_one_copy_and_are_computed_once() -> None:
    pool = KvPool(SHAPE, 100 * PAGE_BYTES, page_tokens=PAGE_TOKENS)
    prompt = [n % 7 for n in range(32)]
    assert [fill(pool, sequence_id, [*prompt, n]) for n, sequence_id in enumerate("abcdefgh")] == [0] + [32] * 7
    cache = pool.describe()
    assert cache.used_bytes == (8 + 8) * PAGE_BYTES
    assert cache.shared_token_count == 7 * 32


def test_callers_that_are_kept_apart_share_no_page() -> None:
    pool = KvPool(SHAPE, 100 * PAGE_BYTES, page_tokens=PAGE_TOKENS)
    prompt = [n % 7 for n in range(32)]
    ids = ("one/a", "other/a", "one/b", "a", "other/b")
    assert [fill(pool, sequence_id, [*prompt, 1]) for sequence_id in ids] == [0, 0, 32, 0, 32]


def test_a_finished_prompt_stays_until_memory_is_wanted_and_the_least_recently_used_goes_first() -> None:
    pool = KvPool(SHAPE, 16 * PAGE_BYTES, page_tokens=PAGE_TOKENS)
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


def test_without_sharing_nothing_is_kept_or_taken_over() -> None:
    pool = KvPool(SHAPE, 16 * PAGE_BYTES, page_tokens=PAGE_TOKENS, prefix_sharing=False)
    assert fill(pool, "a", [1] * 20) == fill(pool, "b", [1] * 20) == 0
    pool.release("a")
    assert pool.describe().idle_bytes == 0


def test_a_full_pool_says_what_is_missing_and_keeps_what_it_has() -> None:
    pool = KvPool(SHAPE, 4 * PAGE_BYTES, page_tokens=PAGE_TOKENS)
    fill(pool, "a", [1] * 10)
    with pytest.raises(
        Overloaded, match=f"{6 * PAGE_BYTES} more bytes are needed, {3 * PAGE_BYTES} of {4 * PAGE_BYTES}"
    ):
        fill(pool, "b", [2] * 21)
    assert pool.length("a") == 10
    assert pool.sequence_count == 1


def paged(page_count: int) -> KvPool:
    return KvPool(SHAPE, page_count * PAGE_BYTES, page_tokens=PAGE_TOKENS)


def strict(page_count: int) -> KvPool:
    return KvPool(SHAPE, page_count * PAGE_BYTES, page_tokens=PAGE_TOKENS, strict=True)


def dense(page_count: int) -> DenseCache:
    return DenseCache(SHAPE, 1 << 20)


def attended_rows(cache: KvCache, base_length: int, count: int, planted: tuple[str, float] | None) -> torch.Tensor:
    """What row a of so many new tokens attends, then row b of two: [H, count + 2, D]; a's second token is planted."""
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
@pytest.mark.parametrize("make", [paged, strict, dense])
def test_what_is_not_finite_reaches_no_earlier_token_and_no_other_row(
    make: Callable[[int], KvCache], base_length: int, count: int, page_count: int, part: str, number: float
) -> None:
    """Review B3: a weight of 0 does not hide an infinity."""
    expected = attended_rows(make(page_count), base_length, count, None)
    found = attended_rows(make(page_count), base_length, count, (part, number))
    others = [0, count, count + 1]
    assert torch.equal(found[:, others], expected[:, others])
    assert not found[:, 1].isfinite().all(), "the token itself is as wrong as it was"


@pytest.mark.review
def test_rejected_drafts_that_are_not_finite_reach_no_later_pass_of_the_dense_layout() -> None:
    """Review B3: a row with fewer new tokens than its neighbour has them in its padding."""

    def later(number: float) -> torch.Tensor:
        cache = dense(0)
        for sequence_id in "ab":
            fill(cache, sequence_id, [1] * 6)
            cache.append(sequence_id, [3] * 3)
        generator = torch.Generator().manual_seed(3)
        query, key, value = (
            torch.randn(heads, 6, SHAPE.head_size, generator=generator) for heads in (HEAD_COUNT, 2, 2)
        )
        value[:, 2] = number
        cache.attention([Span("a", 0, 3, 9), Span("b", 3, 6, 9)]).attend(0, query, key, value, 0.5)
        for sequence_id, count in (("a", 1), ("b", 3)):
            cache.truncate(sequence_id, 6)
            cache.append(sequence_id, [4] * count)
        attention = cache.attention([Span("a", 0, 1, 7), Span("b", 1, 4, 9)])
        return attention.attend(0, query[:, :4], key[:, :4], torch.ones(2, 4, SHAPE.head_size), 0.5)

    assert torch.equal(later(float("inf")), later(1.0))


class Watched(tuple[int, ...]):
    """A prompt that counts the tokens which are copied out of it."""

    copied_count = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.copied_count += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.review
def test_taking_over_a_cached_prompt_costs_as_much_as_it_is_long() -> None:
    """Review B10: it grew with the square, 1.24 s for 131,072 tokens."""
    pool = KvPool(SHAPE, 2000 * PAGE_BYTES, page_tokens=PAGE_TOKENS)
    prompt = [n % 7 for n in range(4 * 1000)]
    pool.keep("a", 0, ())
    pool.append("a", prompt)
    pool.seal("a", len(prompt))
    watched = Watched(prompt)
    assert pool.keep("b", 0, watched) == len(prompt)
    assert watched.copied_count <= 2 * len(prompt)


def test_truncation_and_regrowth_within_a_page_copy_nothing() -> None:
    pool = KvPool(SHAPE, 40 * PAGE_BYTES, page_tokens=PAGE_TOKENS)
    fill(pool, "a", [5] * 50)
    pages = list(pool._sequences["a"].pages)
    pool.truncate("a", 46)
    pool.keep("a", 45, ())
    pool.append("a", [6] * 5)
    assert pool._sequences["a"].pages == pages


def test_rows_of_equal_growth_are_not_realigned() -> None:
    cache = DenseCache(SHAPE, 1 << 20)
    rows: dict[str, tuple[list[int], int]] = {}
    realigned: list[int] = []
    for growth in (3, 3, 2):
        for sequence_id, prompt in (("a", [1] * 9), ("b", [2] * 4)):
            whole = [*rows.get(sequence_id, (prompt, 0))[0], *[1] * growth]
            base_length = len(whole) - growth if sequence_id in rows else 0
            cache.keep(sequence_id, base_length, ())
            cache.append(sequence_id, whole[base_length:])
            rows[sequence_id] = whole, len(whole) - base_length
        run_pass(cache, rows)
        realigned.append(cache.describe().realigned_bytes)
    # The prompts are of unequal length, so the second pass brings them to one edge; then both grow by as much.
    assert realigned[0] == 0
    assert realigned[1] == (12 + 7) * SHAPE.token_bytes
    assert realigned[2] == realigned[1]


def test_a_dense_cache_that_memory_runs_out_on_goes_on_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows were put aside one by one while the rectangle still listed them: the next pass of any row failed."""
    cache = DenseCache(SHAPE, 1 << 20)
    rows = {sequence_id: ([token] * 5, 5) for sequence_id, token in (("a", 1), ("b", 2), ("c", 1))}
    for sequence_id, (token_ids, _) in rows.items():
        cache.keep(sequence_id, 0, ())
        cache.append(sequence_id, token_ids)
    run_pass(cache, {one: rows[one] for one in "ab"})
    clone, copied = torch.Tensor.clone, iter((True, False))

    def clone_once(tensor: torch.Tensor) -> torch.Tensor:
        if not next(copied):
            raise MemoryError
        return clone(tensor)

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(torch.Tensor, "clone", clone_once)
        run_pass(cache, {"c": rows["c"]})
    cache.release("a")
    run_pass(cache, {"c": rows["c"]})
    cache.append("b", [1])
    run_pass(cache, {"b": ([2] * 5 + [1], 1)})
