"""The dense layout: moves of rows, and the contents of their padding."""

import pytest
import torch

from paceline.engine.cache.dense import RECTANGLES, SLACK, DenseCache
from paceline.engine.interfaces import Span
from paceline.errors import CacheFull
from tests.caches import HEAD_COUNT, SHAPE, fill, run_pass


@pytest.mark.review
def test_rejected_drafts_that_are_not_finite_reach_no_later_pass_of_the_dense_layout() -> None:
    """Review B3: a row with fewer new tokens than its neighbour has the rejected drafts in its padding."""

    def later(number: float) -> torch.Tensor:
        cache = DenseCache(SHAPE, 1 << 20)
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
    # The prompts differ in length, so the second pass aligns them; then both grow by the same count.
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


@pytest.mark.review
def test_sequences_that_were_cut_to_nothing_take_no_room_from_others() -> None:
    """Review C6: empty sequences counted as rows of the rectangle, so a rollback freed no room for others."""
    row_bytes = RECTANGLES * SHAPE.token_bytes
    cache = DenseCache(SHAPE, row_bytes * 2 * (SLACK + 8))
    for sequence_id in "ab":
        fill(cache, sequence_id, [1] * 8)
    cache.keep("c", 0, ())
    with pytest.raises(CacheFull):
        cache.append("c", [1] * 8)
    for sequence_id in "ab":
        cache.truncate(sequence_id, 0)
    fill(cache, "c", [1] * 60)


def test_what_a_cut_frees_is_counted_as_what_is_missing_is() -> None:
    """A cut was reported to free nothing, so one shortage took back all other sequences."""
    cache = DenseCache(SHAPE, RECTANGLES * SHAPE.token_bytes * 2 * (SLACK + 8))
    for sequence_id in "ab":
        fill(cache, sequence_id, [1] * 8)
    cache.keep("c", 0, ())
    with pytest.raises(CacheFull) as refused:
        cache.append("c", [1] * 8)
    held_bytes = cache.held_bytes
    cache.truncate("b", 0)
    assert held_bytes - cache.held_bytes == refused.value.missing_bytes
    fill(cache, "c", [1] * 8)


def test_what_was_cut_takes_no_memory_wherever_it_lay() -> None:
    """Rows put aside kept their length, so the cache outgrew its budget."""
    cache = DenseCache(SHAPE, RECTANGLES * SHAPE.token_bytes * 8 * (SLACK + 50))
    aside: list[str] = []
    for generation in range(40):
        names = [f"{generation}-{number}" for number in range(4)]
        for name in names:
            cache.keep(name, 0, ())
            cache.append(name, [1] * 40)
        run_pass(cache, {name: ([1] * 40, 40) for name in names})
        for name in aside:
            cache.truncate(name, 0)
        aside = names
    assert cache.describe().used_bytes <= cache.capacity_bytes
