"""The compiled operations equal torch's, up to rounding, wherever a pass's rows lie."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.cache.paged import KvPool
from paceline.engine.interfaces import Span
from paceline.engine.loading import load_model
from paceline.engine.model.compiled_decoder import CompiledDecoder
from paceline.engine.model.model import LoadedModel
from paceline.engine.native import DTYPES, HEAD_SIZES, Kernels, PassRows, find_kernels
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.engine.threads import using_threads
from tests.checkpoints import write_model
from tests.tools import missing

MAX_LENGTH = 200
SLOT_COUNT = 700


def built() -> Kernels:
    kernels = find_kernels()
    if kernels is None:
        missing("the kernels were not built; scripts/compiler installs a compiler, then remove .venv")
    return kernels


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
            PassRows(self.spans, self.segments),
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
    dtype=st.sampled_from(DTYPES),
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
        found = case.compiled(built(), with_norms=with_norms)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, case.expected(with_norms=with_norms), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@settings(max_examples=40)
@given(
    head_size=st.sampled_from(HEAD_SIZES),
    group_size=st.integers(1, 5),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    before=st.integers(0, 60),
    seed=st.integers(0, 1000),
)
def test_in_bfloat16_a_token_attends_the_same_in_one_row_or_in_several_and_among_any_rows(
    head_size: int, group_size: int, counts: list[int], before: int, seed: int
) -> None:
    """`counts` are pieces of one sequence: computed as one row beside another, and each alone after the ones before."""
    case = Case((2, group_size), head_size, [(5, 9, []), (sum(counts), before, [7])], seed, torch.bfloat16)
    expected = case.compiled(built(), with_norms=True)[0][5:]
    projected, places, length = case.projected[5:], case.segments[1], before
    for count in counts:
        length += count
        case.spans, case.segments = [Span("s", 0, count, length)], [first_slots(places, length)]
        case.projected, projected = projected[:count], projected[count:]
        found, case.keys, case.values = case.compiled(built(), with_norms=True)
        assert torch.equal(found, expected[:count])
        expected = expected[count:]


@pytest.mark.review
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(("part", "reach"), [("query", 1), ("key", 40), ("value", 40)])
@pytest.mark.parametrize("count", [2, 6, 40])
def test_what_is_no_number_stays_so_and_reaches_no_other_sequence_and_no_earlier_position(
    part: str, reach: int, number: float, count: int
) -> None:
    """Review B3. Two tokens go query by query, six as lanes, forty as several groups of lanes."""
    case = Case((2, 3), 48, [(count, 40, []), (count, 40, [11]), (1, 40, [])], seed=1)
    expected = case.compiled(built(), with_norms=True)[0]
    # In the second row's second token: only the rest of its row sees it.
    at = count + 1
    touched = range(at, min(at + reach, 2 * count))
    case.projected[at, {"query": 0, "key": 6, "value": 8}[part] * 48 + 5] = number
    attended = case.compiled(built(), with_norms=True)[0]
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
    assert case.compiled(built(), with_norms=False)[0][-1].isnan().all()


@settings(max_examples=40)
@given(
    token_count=st.integers(1, 20),
    size=st.integers(1, 100),
    is_first=st.booleans(),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
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
    found = built().add_and_norm(held, None if is_first else added, weight, 1e-5, dtype)
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
    found = built().gate(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(
        built().gate(torch.cat((gate, up), dim=1), torch.bfloat16).nan_to_num(), found.bfloat16().nan_to_num()
    )


@pytest.mark.parametrize("size", [16, 21])
def test_results_are_rounded_to_bfloat16_as_by_torch(size: int) -> None:
    numbers = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38, 3.4e38, 1e-40, -0.0, float("inf"), float("nan")]
    up = torch.tensor([(numbers * 3)[:size]])
    gate = torch.full_like(up, 100)  # whose silu is itself
    found, expected = built().gate(torch.cat((gate, up / 100), dim=1), torch.bfloat16), (gate * (up / 100)).bfloat16()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_work_is_shared_among_threads_and_its_results_do_not_change() -> None:
    hidden, weight = torch.randn(64, 1024), torch.randn(1024)
    alone: list[torch.Tensor] = []
    shared: list[torch.Tensor] = []
    for thread_count, found in ((1, alone), (4, shared)):
        with using_threads(thread_count):
            found.append(built().add_and_norm(hidden.clone(), hidden, weight, 1e-5))
            found.append(built().gate(hidden))
    assert all(torch.equal(one, other) for one, other in zip(alone, shared, strict=True))


@pytest.fixture(scope="module", params=["Llama", "Qwen3", "Qwen2"], name="model")
def model_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    built()
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder, request.param)
    return load_model(str(folder))


def logits(model: LoadedModel, rows: Sequence[Sequence[PackedRow]]) -> Iterator[torch.Tensor]:
    """Yield the logits of consecutive calls."""
    runner = Runner(model, EngineOptions(kv_memory="1MiB", page_tokens=4))
    for call in rows:
        for outcome in runner.forward(call):
            assert isinstance(outcome, torch.Tensor)
            yield outcome


def test_a_model_gives_the_logits_of_torchs_operations(model: LoadedModel) -> None:
    decoder = model.decoder
    assert isinstance(decoder, CompiledDecoder)
    plain = replace(model, decoder=decoder.plain)
    first, second = tuple(range(20, 60)), (*range(20, 45), *range(90, 99))
    calls = [
        [PackedRow("a", 0, first), PackedRow("b", 0, second[:7])],
        # A row in two segments: shared pages of the first, then its own.
        [PackedRow("c", 0, (*first[:30], 7, 8, 9), draft_count=2), PackedRow("a", 40, (3, 4, 5, 6, 7, 8), 5)],
        [PackedRow("b", 7, second[7:]), PackedRow("a", 43, (9,)), PackedRow("c", 33, (1, 2), 1)],
    ]
    for one, other in zip(logits(model, calls), logits(plain, calls), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_passes_on_several_threads_give_the_same(model: LoadedModel) -> None:
    pool = KvPool(model.kv_shape, 2**20, page_tokens=4)
    pool.keep("a", 0, ())
    pool.append("a", range(50, 70))
    token_ids, positions = torch.arange(50, 70)[None], torch.arange(20)[None]
    wanted, attention = torch.arange(20), pool.attention([Span("a", 0, 20, 20)])
    found = []
    for thread_count in (1, 2, 3):
        with using_threads(thread_count):
            found.append(model.decoder.logits(token_ids, positions, wanted, attention))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-4, atol=1e-4)


def test_without_the_library_there_are_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.native.kernels.LIBRARY", tmp_path / "none.so")
    assert find_kernels.__wrapped__() is None
    (tmp_path / "none.so").write_bytes(b"of another machine")
    assert find_kernels.__wrapped__() is None


def test_a_library_of_another_source_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built()
    (tmp_path / "changed.cpp").write_text("// Something else.")
    monkeypatch.setattr("paceline.engine.native.kernels.SOURCES", [tmp_path / "changed.cpp"])
    assert find_kernels.__wrapped__() is None


@torch.inference_mode()
def test_a_sequence_longer_than_the_models_positions_is_refused(model: LoadedModel) -> None:
    length = model.description.max_length + 1
    pool = KvPool(model.kv_shape, 2 * length * model.kv_shape.token_bytes, page_tokens=4)
    pool.keep("a", 0, ())
    pool.append("a", (5,) * length)
    token_ids, attention = torch.full((1, length), 5), pool.attention([Span("a", 0, length, length)])
    with using_threads(1), pytest.raises(IndexError, match="positions"):
        model.decoder.logits(token_ids, torch.arange(length)[None], torch.tensor([0]), attention)
