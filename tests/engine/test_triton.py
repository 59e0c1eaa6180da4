"""The Triton kernels equal torch's operations, up to rounding, and no row's result depends on another.

On a GPU they are compiled; elsewhere, or with `TRITON_INTERPRET=1`, they run in Triton's interpreter on a CPU, which
shows what is read and written, and not how a device rounds.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.attention.tables import TableAttention, TableRows, planned_rows, tile_queries
from paceline.engine.backend import triton_backend
from paceline.engine.interfaces import Span
from paceline.engine.plan import BatchPlan
from tests.tools import triton_device, triton_runs

if TYPE_CHECKING:
    from paceline.engine.triton import TiledWeight, TritonKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEAD_SIZES, GROUP_SIZES = [48, 64, 80, 96, 128, 256], [1, 4, 8, 16]
DEVICE = triton_device()
PAGE_TOKENS = 4
# The interpreter's numpy warns of numbers that are none, which some tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if DEVICE.type == "cpu":
        triton_runs()


def tolerance(dtype: torch.dtype) -> float:
    """Return how far results of a dtype may be from torch's, whichever of them rounds better."""
    return 1e-4 if dtype == torch.float32 else 2e-2


def kernels() -> "TritonKernels":
    from paceline.engine.triton import TritonKernels

    return TritonKernels()


class Case:
    """Attention of rows of random numbers over pages in any order. A row has new tokens and earlier tokens.

    Numbers lie on the CPU, where torch computes what is expected; kernels get copies on their device.
    """

    def __init__(
        self, heads: tuple[int, int], head_size: int, rows: Sequence[tuple[int, int]], seed: int, dtype: torch.dtype
    ) -> None:
        """`heads` are KV heads and queries of each."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.kv_head_count, self.group_size = heads
        self.head_size, self.dtype = head_size, dtype
        self.head_count = self.kv_head_count * self.group_size
        spans, first = list[Span](), 0
        for number, (count, before) in enumerate(rows):
            spans.append(Span(str(number), first, first + count, before + count))
            first += count
        page_counts = [-(-span.length // PAGE_TOKENS) for span in spans]
        order = torch.randperm(sum(page_counts) + 2, generator=generator).tolist()
        pages = [[order.pop() for _ in range(count)] for count in page_counts]
        self.plan = BatchPlan(spans, pages, PAGE_TOKENS)
        slot_count = (sum(page_counts) + 2) * PAGE_TOKENS
        self.memory = random(2, self.kv_head_count, slot_count, head_size).to(dtype)
        self.projected = random(first, (self.head_count + 2 * self.kv_head_count) * head_size)
        self.cosines, self.sines = random(800, head_size), random(800, head_size)
        self.norms = (random(head_size), random(head_size))

    def rows(self) -> TableRows:
        return planned_rows(self.plan, self.group_size, DEVICE)

    def found(self, rows: TableRows, *, with_norms: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention output, and the memory afterwards."""
        memory = self.memory.clone().to(DEVICE)
        norms = (self.norms[0].to(DEVICE), self.norms[1].to(DEVICE)) if with_norms else None
        rotation = self.cosines.to(DEVICE), self.sines.to(DEVICE)
        projected = self.projected.clone().to(DEVICE)
        attended = kernels().attend(rows, projected, memory[0], memory[1], rotation, norms, 1e-6, 0.3)
        return attended.cpu(), memory.cpu()

    def expected(self, *, with_norms: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same by torch, a row at a time."""
        memory, outputs = self.memory.clone(), []
        for span, pages in zip(self.plan.spans, self.plan.pages, strict=True):
            slots = torch.tensor([page * PAGE_TOKENS + at for page in pages for at in range(PAGE_TOKENS)])
            slots, positions = slots[: span.length], torch.arange(span.base_length, span.length)
            heads = self.projected[span.start : span.stop].view(span.count, -1, self.head_size).transpose(0, 1)
            query, key, value = heads.split_with_sizes((self.head_count, self.kv_head_count, self.kv_head_count))
            if with_norms:
                query, key = (
                    F.rms_norm(one, norm.shape, norm, 1e-6) for one, norm in zip((query, key), self.norms, strict=True)
                )
            memory[0][:, slots[span.base_length :]] = self._turned(key, positions).to(self.dtype)
            memory[1][:, slots[span.base_length :]] = value.to(self.dtype)
            outputs.append(
                F.scaled_dot_product_attention(
                    self._turned(query, positions).to(self.dtype).float()[None],
                    memory[0][None, :, slots].float(),
                    memory[1][None, :, slots].float(),
                    attn_mask=torch.arange(span.length) <= positions[:, None],
                    scale=0.3,
                    enable_gqa=True,
                )[0].transpose(0, 1)
            )
        return torch.cat(outputs).flatten(1).to(self.dtype), memory

    def _turned(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return heads * self.cosines[positions] + heads.roll(self.head_size // 2, -1) * self.sines[positions]


def cases(
    heads: st.SearchStrategy[tuple[int, int]], counts: st.SearchStrategy[int], most_rows: int
) -> st.SearchStrategy[Case]:
    """Draw cases of these heads, with rows of these counts of new tokens."""
    rows = st.tuples(counts, st.sampled_from([0, 1, 7, 63, 64, 250, 255, 256, 300]))
    return st.builds(
        Case,
        heads,
        st.sampled_from([2, 6, 16, 48, 64, 80, 96, 128]),
        st.lists(rows, min_size=1, max_size=most_rows),
        st.integers(0, 1000),
        st.sampled_from(DTYPES),
    )


# The interpreter takes its time for every token in every head: most rows are of one tile, and some of two.
@settings(max_examples=6)
@given(
    case=cases(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (1, 9)]), st.sampled_from([1, 2, 4, 17]), most_rows=2),
    with_norms=st.booleans(),
)
def test_rows_attend_as_by_torch_wherever_their_pages_lie(case: Case, with_norms: bool) -> None:
    check_attention(case, with_norms=with_norms)


@pytest.mark.long
@settings(max_examples=20)
@given(
    case=cases(st.tuples(st.integers(1, 2), st.integers(1, 9)), st.integers(1, 20), most_rows=3),
    with_norms=st.booleans(),
)
def test_so_do_more_rows_of_more_heads(case: Case, with_norms: bool) -> None:
    check_attention(case, with_norms=with_norms)


def check_attention(case: Case, *, with_norms: bool) -> None:
    found, close = case.found(case.rows(), with_norms=with_norms), tolerance(case.dtype)
    for one, other in zip(found, case.expected(with_norms=with_norms), strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_heads_of_every_size_and_group_attend_as_by_torch(head_size: int, group_size: int, dtype: torch.dtype) -> None:
    """A row of two tiles, one across the end of a split, and one without earlier tokens."""
    rows = [(tile_queries(group_size) + 1, 3), (2, 255), (1, 0)]
    check_attention(Case((1, group_size), head_size, rows, head_size + group_size, dtype), with_norms=head_size == 128)


@pytest.mark.parametrize(
    "dtype", [pytest.param(one, marks=() if one == torch.bfloat16 else pytest.mark.long) for one in DTYPES], ids=str
)
def test_a_token_attends_the_same_in_one_row_or_in_several_and_among_any_rows(dtype: torch.dtype) -> None:
    case = Case((1, 2), 16, [(2, 9), (23, 240)], 1, dtype)
    expected = case.found(case.rows(), with_norms=True)[0][2:]
    projected, pages, length = case.projected[2:], case.plan.pages[1], 240
    for count in (1, 17, 5):
        length += count
        case.plan = BatchPlan([Span("s", 0, count, length)], [pages[: -(-length // PAGE_TOKENS)]], PAGE_TOKENS)
        case.projected, projected = projected[:count], projected[count:]
        found, case.memory = case.found(case.rows(), with_norms=True)
        assert torch.equal(found, expected[:count])
        expected = expected[count:]


def three_rows() -> Case:
    """Return a row of two tiles between two others. Its tokens are 1 to 18."""
    return Case((1, 2), 16, [(1, 40), (18, 40), (1, 40)], 1, torch.float32)


@pytest.fixture(scope="module")
def finite() -> torch.Tensor:
    """Return what `three_rows` attend to while all their numbers are finite."""
    return three_rows().found(three_rows().rows(), with_norms=True)[0]


@pytest.mark.review
@pytest.mark.parametrize(
    ("part", "reach", "number"),
    [
        ("query", 1, float("nan")),
        ("key", 17, float("inf")),
        ("value", 17, float("inf")),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in [("query", 1, float("inf")), ("key", 17, float("nan")), ("value", 17, float("nan"))]
        ),
    ],
)
def test_what_is_no_number_reaches_no_other_sequence_and_no_earlier_position(
    part: str, reach: int, number: float, finite: torch.Tensor
) -> None:
    """Review B3."""
    case = three_rows()
    touched = range(2, 2 + reach)
    case.projected[2, {"query": 0, "key": 2, "value": 3}[part] * 16 + 5] = number
    found = case.found(case.rows(), with_norms=True)[0]
    assert (~found.isfinite()).any(dim=1).nonzero().flatten().tolist() == [*touched]
    others = [token for token in range(20) if token not in touched]
    assert torch.equal(found[others], finite[others])


@pytest.mark.review
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_a_pages_last_owner_left_reaches_no_row(number: float) -> None:
    """Review B3 and B4: slots behind a row's last token, and pages of no row."""
    case = Case((1, 2), 16, [(3, 2), (1, 6)], 2, torch.float32)
    expected = case.found(case.rows(), with_norms=False)[0]
    held = {page * PAGE_TOKENS + at % PAGE_TOKENS for span, pages in zip(case.plan.spans, case.plan.pages, strict=True)
            for at in range(span.length) for page in [pages[at // PAGE_TOKENS]]}  # fmt: skip
    case.memory[:, :, [slot for slot in range(case.memory.shape[2]) if slot not in held]] = number
    assert torch.equal(case.found(case.rows(), with_norms=False)[0], expected)


def test_parts_of_heads_attend_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((3, 2), 16, [(4, 260), (2, 3)], 3, torch.float32)
    expected = case.found(case.rows(), with_norms=False)[0]
    for size in (1, 40_000):
        monkeypatch.setattr("paceline.engine.triton.kernels.WORKSPACE_BYTES", size)
        assert torch.equal(case.found(case.rows(), with_norms=False)[0], expected)


def test_stored_apart_keys_and_values_are_read_the_same() -> None:
    """As models do whose own modules run."""
    case = Case((2, 2), 16, [(3, 2), (1, 6)], 2, torch.float32)
    case.cosines, case.sines = torch.ones(800, 16), torch.zeros(800, 16)
    expected, memory = case.found(case.rows(), with_norms=False)
    heads = case.projected.view(4, -1, 16).transpose(0, 1)
    query, key, value = heads.to(DEVICE).split_with_sizes((4, 2, 2))
    held = case.memory.to(DEVICE)
    found = TableAttention(held, case.rows(), kernels()).attend(0, query, key, value, 0.3)
    assert torch.equal(found.transpose(0, 1).flatten(1).cpu(), expected)
    assert torch.equal(held.cpu(), memory)


@settings(max_examples=15)
@given(
    row_count=st.integers(1, 130),
    column_count=st.integers(1, 70),
    size=st.integers(1, 200),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
)
def test_products_are_torchs(
    row_count: int, column_count: int, size: int, has_bias: bool, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, weight = (torch.randn(n, size, generator=generator).to(dtype) for n in (row_count, column_count))
    bias = torch.randn(column_count, generator=generator) if has_bias else None
    multiply = triton_backend().pack(weight.to(DEVICE), None if bias is None else bias.to(DEVICE))
    assert multiply
    found = multiply(rows.to(DEVICE).float())
    torch.testing.assert_close(found.cpu(), F.linear(rows.float(), weight.float(), bias), rtol=1e-4, atol=1e-3)
    some = slice(row_count // 3, row_count // 3 + 5)
    assert torch.equal(multiply(rows[some].to(DEVICE)), found[some])


class Library:
    """Equals the kernel, or is one rounding off in one place, and counts what it is asked for."""

    def __init__(self, off_at: int | None = None) -> None:
        self._off_at = off_at
        self.row_counts: list[int] = []

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.row_counts.append(len(rows))
        found = tiled(weight, None, None)(rows)
        if self._off_at is not None:
            found[self._off_at, -1] = found[self._off_at, -1].nextafter(found.new_tensor(1e9))
        return found


def tiled(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    library: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
) -> "TiledWeight":
    from paceline.engine.triton import TiledWeight

    return TiledWeight(kernels(), weight, bias, library)


def many_rows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, a weight and a bias."""
    generator = torch.Generator().manual_seed(count)
    rows, weight = (torch.randn(size, 8, generator=generator).to(DEVICE) for size in (count, 5))
    return rows, weight, torch.randn(5, generator=generator).to(DEVICE)


@pytest.mark.parametrize("count", [65, 128, 150])
def test_products_of_many_rows_are_a_library_s_where_it_equals_the_kernel(count: int) -> None:
    (rows, weight, bias), library = many_rows(count), Library()
    multiply = tiled(weight, bias, library)
    found = multiply(rows)
    assert torch.equal(found, tiled(weight, bias, Library(off_at=0))(rows))
    # Padded to a size that was tried, and tried once.
    size = 128 if count <= 128 else 192
    assert library.row_counts == [size, size] and torch.equal(multiply(rows), found)
    assert library.row_counts == [size] * 3


@pytest.mark.parametrize("off_at", [0, 127])
def test_a_library_that_rounds_otherwise_is_asked_once(off_at: int) -> None:
    (rows, weight, bias), library = many_rows(100), Library(off_at)
    multiply = tiled(weight, bias, library)
    found = multiply(rows)
    torch.testing.assert_close(found, F.linear(rows, weight, bias))
    assert torch.equal(multiply(rows), found) and library.row_counts == [128]


def test_few_rows_and_a_library_that_cannot_are_left_to_the_kernel() -> None:
    def library(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("expected another dtype")

    (rows, weight, bias), asked = many_rows(70), Library()
    assert torch.equal(tiled(weight, bias, library)(rows)[:64], tiled(weight, bias, asked)(rows[:64]))
    assert not asked.row_counts


@settings(max_examples=15)
@given(
    token_count=st.integers(1, 5),
    size=st.integers(1, 1500),
    is_first=st.booleans(),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
)
def test_sums_norms_and_gates_are_torchs(
    token_count: int, size: int, is_first: bool, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, added = (torch.randn(token_count, 2 * size, generator=generator) for _ in range(2))
    weight = torch.randn(2 * size, generator=generator)
    total = hidden if is_first else hidden + added
    held, close = hidden.clone().to(DEVICE), tolerance(dtype)
    normed = kernels().add_and_norm(held, None if is_first else added.to(DEVICE), weight.to(DEVICE), 1e-5, dtype)
    assert torch.equal(held.cpu(), total) and normed.dtype == dtype
    torch.testing.assert_close(
        normed.cpu().float(), F.rms_norm(total, weight.shape, weight, 1e-5), rtol=close, atol=close
    )
    gate, up = hidden.chunk(2, dim=1)
    gated = kernels().gate(hidden.to(DEVICE), dtype)
    torch.testing.assert_close(gated.cpu().float(), F.silu(gate) * up, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gates_of_a_token_depend_on_no_other(dtype: torch.dtype) -> None:
    hidden = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weight = torch.ones(96, device=DEVICE)
    normed = kernels().add_and_norm(hidden.clone(), hidden, weight, 1e-5, dtype)
    gated = kernels().gate(hidden, dtype)
    for token in (slice(0, 1), slice(4, 7)):
        own = hidden[token].clone()
        assert torch.equal(kernels().add_and_norm(own.clone(), own, weight, 1e-5, dtype), normed[token])
        assert torch.equal(kernels().gate(own, dtype), gated[token])


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu() -> None:
    """Where no GPU is, as on most machines that build this: Triton brings the assembler along."""
    compile_kernels()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_kernels_compile_for_heads_of_every_size_and_group() -> None:
    compile_kernels("--whole")


def compile_kernels(*flags: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-m", "tests.compile_triton", *flags], env=environment, check=True)
