"""The compiled operations equal torch's, up to rounding, wherever a pass's rows lie."""

from collections.abc import Sequence
from ctypes import CDLL
from itertools import chain, pairwise, product, starmap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.interfaces import Span
from paceline.engine.native import HEAD_SIZES, Kernels, PassRows, find_kernels
from paceline.engine.native.kernels import LIBRARY
from paceline.engine.plan import Places
from paceline.engine.threads import using_threads
from tests.tools import built_kernels

CACHE_DTYPES = [torch.float32, torch.bfloat16]
MAX_LENGTH = 200
SLOT_COUNT = 700


def normed(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(values, weight.shape, weight, epsilon)


def segments_of(length: int, cuts: Sequence[int], generator: torch.Generator) -> list[tuple[int, int]]:
    """Return places of a sequence's tokens: pieces strewn over the slots in any order."""
    edges = sorted({0, length, *(cut % length for cut in cuts)})
    sizes = [stop - start for start, stop in pairwise(edges)]
    found, free = [(0, 0)] * len(sizes), 0
    for place in torch.randperm(len(sizes), generator=generator).tolist():
        free += int(torch.randint(4, (1,), generator=generator))
        found[place] = (free, free + sizes[place])
        free += sizes[place]
    return found


def first_slots(segments: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return the segments of a sequence's first tokens."""
    found = []
    for start, stop in segments:
        stop = min(stop, start + count)
        found.append((start, stop))
        count -= stop - start
    return [(start, stop) for start, stop in found if start < stop]


class Case:
    """A layer's attention over rows of random numbers."""

    def __init__(
        self,
        heads: tuple[int, int],
        head_size: int,
        rows: Sequence[tuple[int, int, list[int]]],
        seed: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`heads` are KV heads and queries of each; a row has new tokens, earlier tokens, and cuts.

        `dtype` is the cache's.
        """
        generator = torch.Generator().manual_seed(seed)
        self.kv_head_count, group_size = heads
        self.head_count, self.head_size = self.kv_head_count * group_size, head_size
        self.spans: list[Span] = []
        self.segments: list[list[tuple[int, int]]] = []
        first = base = 0
        for count, before, cuts in rows:
            self.spans.append(Span("s", first, first + count, before + count))
            parts = segments_of(before + count, cuts, generator)
            self.segments.append([(base + start, base + stop) for start, stop in parts])
            first += count
            base = max(stop for _, stop in self.segments[-1])
        width = (self.head_count + 2 * self.kv_head_count) * head_size
        self.projected = torch.randn(first, width, generator=generator)
        self.keys, self.values = (
            torch.randn(self.kv_head_count, max(base, SLOT_COUNT), head_size, generator=generator).to(dtype)
            for _ in range(2)
        )
        self.cosines, self.sines = (torch.randn(MAX_LENGTH, head_size, generator=generator) for _ in range(2))
        self.norms = tuple(torch.randn(head_size, generator=generator) for _ in range(2))

    def compiled(self, kernels: Kernels, *, with_norms: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the attention output, and the keys and values in memory afterwards."""
        keys, values = self.keys.clone(), self.values.clone()
        norms = (self.norms[0], self.norms[1]) if with_norms else None
        attended = kernels.attend(
            PassRows(self.spans, Places([[*chain(*starmap(range, one))] for one in self.segments], 1, 1)),
            self.projected.clone(),
            keys,
            values,
            (self.cosines, self.sines),
            norms,
            1e-6,
            0.3,
        )
        return attended, keys, values

    def expected(self, *, with_norms: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the same by torch, a row at a time."""
        keys, values, dtype, outputs = self.keys.clone(), self.values.clone(), self.keys.dtype, []
        for span, parts in zip(self.spans, self.segments, strict=True):
            slots = torch.cat([torch.arange(*part) for part in parts])
            positions = torch.arange(span.base_length, span.length)
            heads = self.projected[span.start : span.stop].view(span.count, -1, self.head_size).transpose(0, 1)
            query, key, value = heads.split_with_sizes((self.head_count, self.kv_head_count, self.kv_head_count))
            if with_norms:
                query, key = (normed(one, norm, 1e-6) for one, norm in zip((query, key), self.norms, strict=True))
            keys[:, slots[span.base_length :]] = self._turned(key, positions).to(dtype)
            values[:, slots[span.base_length :]] = value.to(dtype)
            seen = torch.arange(span.length) <= positions[:, None]
            outputs.append(
                F.scaled_dot_product_attention(
                    self._turned(query, positions)[None],
                    keys[None, :, slots].float(),
                    values[None, :, slots].float(),
                    attn_mask=seen,
                    scale=0.3,
                    enable_gqa=True,
                )[0].transpose(0, 1)
            )
        return torch.cat(outputs).flatten(1).to(dtype), keys, values

    def _turned(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        halves = heads.roll(self.head_size // 2, -1)
        return heads * self.cosines[positions] + halves * self.sines[positions]


@settings(max_examples=60)
@given(
    heads=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    head_size=st.sampled_from(HEAD_SIZES),
    rows=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 90), st.lists(st.integers(0, 200), max_size=3)),
        min_size=1,
        max_size=4,
    ),
    with_norms=st.booleans(),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(CACHE_DTYPES),
    thread_count=st.integers(1, 3),
)
def test_rows_attend_as_by_torch_wherever_they_lie(
    heads: tuple[int, int],
    head_size: int,
    rows: list[tuple[int, int, list[int]]],
    with_norms: bool,
    seed: int,
    dtype: torch.dtype,
    thread_count: int,
) -> None:
    case = Case(heads, head_size, rows, seed, dtype)
    with using_threads(thread_count):
        found = case.compiled(built_kernels(), with_norms=with_norms)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, case.expected(with_norms=with_norms), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        ((3, 2), [(1, 190, []), (90, 100, [5]), (6, 150, []), (1, 20, [])]),
        # So few queries that they are cut into smaller blocks, the more threads there are.
        ((8, 2), [(6, 190, [7]), (1, 150, [])]),
    ],
)
def test_threads_share_attention_without_changing_a_bit_of_it(
    heads: tuple[int, int], rows: list[tuple[int, int, list[int]]], dtype: torch.dtype
) -> None:
    case = Case(heads, 48, rows, seed=1, dtype=dtype)
    with using_threads(1):
        expected = case.compiled(built_kernels(), with_norms=True)
    for count in (2, 3, 5):
        with using_threads(count):
            found = case.compiled(built_kernels(), with_norms=True)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@settings(max_examples=40)
@given(
    head_size=st.sampled_from(HEAD_SIZES),
    group_size=st.integers(1, 5),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    before=st.integers(0, 60),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(CACHE_DTYPES),
)
def test_a_token_attends_the_same_in_one_row_or_in_several_and_among_any_rows(
    head_size: int, group_size: int, counts: list[int], before: int, seed: int, dtype: torch.dtype
) -> None:
    """`counts` are pieces of one sequence: computed as one row beside another, and each alone after the ones before."""
    case = Case((2, group_size), head_size, [(5, 9, []), (sum(counts), before, [7])], seed, dtype)
    expected = case.compiled(built_kernels(), with_norms=True)[0][5:]
    projected, places, length = case.projected[5:], case.segments[1], before
    for count in counts:
        length += count
        case.spans, case.segments = [Span("s", 0, count, length)], [first_slots(places, length)]
        case.projected, projected = projected[:count], projected[count:]
        found, case.keys, case.values = case.compiled(built_kernels(), with_norms=True)
        assert torch.equal(found, expected[:count])
        expected = expected[count:]


@pytest.mark.review
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(("part", "reach"), [("query", 1), ("key", 40), ("value", 40)])
@pytest.mark.parametrize("count", [2, 6, 40])
def test_what_is_no_number_stays_so_and_reaches_no_other_sequence_and_no_earlier_position(
    part: str, reach: int, number: float, count: int
) -> None:
    """Review B3. With three heads to a KV head, two tokens are a block of four queries and one of two."""
    case = Case((2, 3), 48, [(count, 40, []), (count, 40, [11]), (1, 40, [])], seed=1)
    expected = case.compiled(built_kernels(), with_norms=True)[0]
    # In the second row's second token: only the rest of its row sees it.
    at = count + 1
    touched = range(at, min(at + reach, 2 * count))
    case.projected[at, {"query": 0, "key": 6, "value": 8}[part] * 48 + 5] = number
    attended = case.compiled(built_kernels(), with_norms=True)[0]
    assert (~attended.isfinite()).any(dim=1).nonzero().flatten().tolist() == [*touched]
    others = [token for token in range(2 * count + 1) if token not in touched]
    assert torch.equal(attended[others], expected[others])


@pytest.mark.review
@pytest.mark.parametrize("length", [3, 16])
@pytest.mark.parametrize("count", [1, 3])
def test_a_query_whose_scores_are_all_minus_infinity_has_no_number(length: int, count: int) -> None:
    """Review B3: sixteen keys fill the lanes, three leave some empty."""
    case = Case((1, 3), 48, [(count, length - count, [])], seed=1)
    for one in (case.cosines, case.sines, case.keys, case.projected):
        one.fill_(1)
    case.projected[-1, : 3 * 48] = float("-inf")
    assert case.compiled(built_kernels(), with_norms=False)[0][-1].isnan().all()


@settings(max_examples=40)
@given(
    token_count=st.integers(1, 20),
    size=st.integers(1, 100),
    is_first=st.booleans(),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(CACHE_DTYPES),
)
def test_sums_and_their_norms_are_torchs(
    token_count: int, size: int, is_first: bool, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, added = (torch.randn(token_count, size, generator=generator) for _ in range(2))
    weight = torch.randn(size, generator=generator)
    total = hidden if is_first else hidden + added
    expected = normed(total, weight, 1e-5)
    held = hidden.clone()
    found = built_kernels().add_and_norm(held, None if is_first else added, weight, 1e-5, dtype)
    assert torch.equal(held, total)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


@settings(max_examples=40)
@given(
    gates=st.lists(st.floats(width=32), min_size=1, max_size=50),
    seed=st.integers(0, 1000),
)
def test_gates_are_torchs_for_numbers_of_any_size(gates: list[float], seed: int) -> None:
    gate = torch.tensor([gates, gates[::-1]])
    up = torch.randn(gate.shape, generator=torch.Generator().manual_seed(seed))
    found = built_kernels().gate(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(
        built_kernels().gate(torch.cat((gate, up), dim=1), torch.bfloat16).nan_to_num(), found.bfloat16().nan_to_num()
    )


@pytest.mark.parametrize("size", [16, 21])
def test_results_are_rounded_to_bfloat16_as_by_torch(size: int) -> None:
    numbers = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38, 3.4e38, 1e-40, -0.0, float("inf"), float("nan")]
    up = torch.tensor([(numbers * 3)[:size]])
    gate = torch.full_like(up, 100)  # whose silu is itself
    found = built_kernels().gate(torch.cat((gate, up / 100), dim=1), torch.bfloat16)
    torch.testing.assert_close(found, (gate * (up / 100)).bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtypes", [*product(CACHE_DTYPES, CACHE_DTYPES)])
@pytest.mark.parametrize("size", [16, 21])
def test_rows_are_taken_or_copied_in_any_dtype_and_put_beside_others(
    size: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    generator, (dtype, kept) = torch.Generator().manual_seed(size), dtypes
    values = torch.randn(5, size, generator=generator).to(dtype)
    beside = torch.zeros(5, size + 7, dtype=kept)
    places = torch.tensor([4, 0, 0, 3])
    kernels = built_kernels()
    assert torch.equal(kernels.take(values, places, dtype=kept), values[places].to(kept))
    kernels.copied(values, kept, lambda shape, dtype: beside[:, 7:])
    assert torch.equal(beside, F.pad(values.to(kept), (7, 0)))


def test_work_is_shared_among_threads_and_its_results_do_not_change() -> None:
    hidden, weight = torch.randn(64, 1024), torch.randn(1024)
    alone: list[torch.Tensor] = []
    shared: list[torch.Tensor] = []
    for thread_count, found in ((1, alone), (4, shared)):
        with using_threads(thread_count):
            found.append(built_kernels().add_and_norm(hidden.clone(), hidden, weight, 1e-5))
            found.append(built_kernels().gate(hidden))
    assert all(torch.equal(one, other) for one, other in zip(alone, shared, strict=True))


def test_without_the_library_there_are_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.native.kernels.LIBRARY", tmp_path / "none.so")
    assert find_kernels.__wrapped__() is None
    (tmp_path / "none.so").write_bytes(b"of another machine")
    assert find_kernels.__wrapped__() is None


def test_a_processor_that_the_kernels_were_not_compiled_for_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    built_kernels()
    opened = CDLL(str(LIBRARY))  # of its own: the tests' kernels stay as they are
    assert opened.paceline_lanes() > 0
    monkeypatch.setattr("ctypes.CDLL", lambda path: opened)
    assert find_kernels.__wrapped__()
    monkeypatch.setattr(opened, "paceline_lanes", lambda: 0)
    assert find_kernels.__wrapped__() is None


def test_a_library_of_another_source_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built_kernels()
    (tmp_path / "changed.cpp").write_text("// Something else.")
    monkeypatch.setattr("paceline.engine.native.kernels.SOURCES", [tmp_path / "changed.cpp"])
    assert find_kernels.__wrapped__() is None
