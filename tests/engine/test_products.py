"""Our products equal torch's in float32, up to rounding, and no row's result depends on another row."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.native import PackedWeight, find_kernels
from paceline.engine.native.kernels import Kernels
from paceline.engine.native.products import ROW_DTYPES, WAYS, Weight, _least_seconds, best_way, can_pack
from paceline.engine.quantization import QuantizedWeight, rounded_rows
from paceline.engine.threads import using_threads
from tests.tools import built_kernels


def ways() -> list[tuple[torch.dtype, str]]:
    """Return all that this machine has, with their dtypes."""
    kernels = built_kernels()
    found = [(dtype, way) for dtype, ways in WAYS.items() for way in ways if kernels.product_way(way) is not None]
    assert {"float32", "widened", "int8"} <= {way for _, way in found}
    assert all((dtype, best_way(kernels, dtype)) in found for dtype in dict(found))
    return found


def ways_of_rounded_rows() -> list[str]:
    """Return the ways to multiply rows that are rounded to int8; skip the test where there are none."""
    return [way for dtype, way in ways() if dtype == torch.uint8] or pytest.skip("needs AVX2")


def as_weight(weight: torch.Tensor, dtype: torch.dtype) -> tuple[Weight, torch.Tensor]:
    """Return a weight of this dtype and the numbers that it stands for."""
    if dtype in (torch.int8, torch.uint8):
        quantized = QuantizedWeight.of(weight, rounds_rows=dtype == torch.uint8)
        return quantized, quantized.dequantized()
    return weight.to(dtype), weight


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Return random numbers that bfloat16 holds."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


@settings(max_examples=60)
@given(
    row_count=st.integers(0, 70),
    steps=st.integers(1, 9),
    column_count=st.integers(1, 100),
    has_bias=st.booleans(),
    thread_count=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_products_are_torchs(
    row_count: int, steps: int, column_count: int, has_bias: bool, thread_count: int, seed: int
) -> None:
    weight, rows = numbers(column_count, 32 * steps, seed=seed), numbers(row_count, 32 * steps, seed=seed + 1)
    bias = numbers(column_count, seed=seed + 2) if has_bias else None
    for dtype, way in ways():
        own, stands_for = as_weight(weight, dtype)
        read = rounded_rows(rows) if dtype == torch.uint8 else rows
        expected = read @ stands_for.T + (0 if bias is None else bias)
        with using_threads(thread_count):
            found = PackedWeight(own, bias, way)(rows)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("column_count", "size"), [(64, 96), (48, 2112), (1040, 4128)])
def test_a_row_has_the_same_result_among_any_rows_and_with_any_number_of_threads(column_count: int, size: int) -> None:
    weight, rows = numbers(column_count, size, seed=1), numbers(70, size, seed=2)
    # Rows are of the dtype that weights had before they became int8.
    for (dtype, way), before in product(ways(), (torch.float32, torch.bfloat16)):
        multiply = PackedWeight(as_weight(weight.to(before), dtype)[0], numbers(column_count, seed=3), way)
        expected = torch.cat([multiply(rows[m : m + 1]) for m in range(70)])
        for start, stop in ((0, 70), (0, 64), (3, 20), (5, 11), (9, 17), (33, 66)):
            for thread_count in (1, 2, 5):
                with using_threads(thread_count):
                    assert torch.equal(multiply(rows[start:stop]), expected[start:stop]), (
                        way,
                        start,
                        stop,
                        thread_count,
                    )


@pytest.mark.parametrize("strange", [float("inf"), -float("inf"), float("nan"), -float("nan")])
def test_what_is_no_number_stays_in_its_row(strange: float) -> None:
    weight, rows = numbers(40, 64, seed=1), numbers(20, 64, seed=2)
    for dtype, way in ways():
        multiply = PackedWeight(as_weight(weight, dtype)[0], None, way)
        expected = multiply(rows)
        touched = rows.clone()
        touched[7, 5] = strange
        found = multiply(touched)
        assert not found[7].isfinite().any()
        assert torch.equal(found[[*range(7), *range(8, 20)]], expected[[*range(7), *range(8, 20)]])


def test_rows_may_be_of_another_dtype_and_lie_anywhere() -> None:
    weight, rows = numbers(40, 64, seed=1), numbers(34, 64, seed=2).bfloat16()
    multiply = PackedWeight(weight.bfloat16(), None)
    expected = multiply(rows)
    for one in (rows.float(), rows.repeat(1, 2)[:, :64], torch.cat((rows, rows))[34:]):
        assert torch.equal(multiply(one), expected)


@pytest.mark.parametrize(
    ("dtype", "size", "fits"),
    [(torch.float32, 7, True), (torch.bfloat16, 64, True), (torch.bfloat16, 48, False), (torch.float16, 64, False)],
)
def test_what_is_multiplied_here(dtype: torch.dtype, size: int, fits: bool) -> None:
    assert can_pack(torch.ones(3, size, dtype=dtype)) == (fits and bool(find_kernels()))


@pytest.mark.parametrize(
    ("dtype", "size", "fits"),
    [(torch.float32, 36, True), (torch.bfloat16, 36, True), (torch.float16, 36, False), (torch.float32, 7, False)],
)
def test_what_is_multiplied_by_int8_here(dtype: torch.dtype, size: int, fits: bool) -> None:
    weight = QuantizedWeight.of(torch.ones(3, size, dtype=dtype))
    assert can_pack(weight) == (fits and bool(find_kernels()))


@pytest.mark.parametrize(("size", "fits"), [(48, True), (36, False), (1 << 16, True), ((1 << 16) + 16, False)])
def test_what_is_multiplied_by_rounded_rows_here(size: int, fits: bool) -> None:
    has_way = any(dtype == torch.uint8 for dtype, _ in ways())
    assert can_pack(QuantizedWeight.of(torch.ones(3, size), rounds_rows=True)) == (fits and has_way)


def test_the_largest_sums_of_rounded_rows_are_whole() -> None:
    size = 1 << 16
    weight = QuantizedWeight.of(torch.ones(1, size), rounds_rows=True)
    for way in ways_of_rounded_rows():
        multiply = PackedWeight(weight, None, way)
        assert multiply(torch.ones(1, size)).item() == pytest.approx(size, rel=1e-6)
        assert multiply(-torch.ones(1, size)).item() == pytest.approx(-size, rel=1e-6)


def test_a_row_of_zeros_or_of_tiny_numbers_gives_the_bias() -> None:
    weight, bias = QuantizedWeight.of(numbers(20, 64, seed=1), rounds_rows=True), numbers(20, seed=2)
    for way, row in product(ways_of_rounded_rows(), (torch.zeros(1, 64), torch.full((1, 64), 1e-40))):
        torch.testing.assert_close(PackedWeight(weight, bias, way)(row), bias[None])


@pytest.mark.parametrize(("column_count", "size"), [(40, 64), (48, 8256)])
def test_all_ways_to_multiply_rounded_rows_give_the_same_bits(column_count: int, size: int) -> None:
    """Replicas on processors with AVX512-VNNI and without answer alike."""
    weight = QuantizedWeight.of(numbers(column_count, size, seed=1), rounds_rows=True)
    rows, bias = numbers(70, size, seed=2), numbers(column_count, seed=3)
    found = [PackedWeight(weight, bias, way)(rows) for way in ways_of_rounded_rows()]
    sums = rounded_rows(rows).double() @ weight.dequantized().double().T + bias
    torch.testing.assert_close(found[0].double(), sums, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(one, found[0]) for one in found)


def test_rows_beside_int8_are_rounded_to_the_dtype_that_the_weight_had() -> None:
    built_kernels()
    weight, rows = numbers(40, 64, seed=1), torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    in_full, in_half = (
        PackedWeight(QuantizedWeight.of(weight.to(dtype)), None) for dtype in (torch.float32, torch.bfloat16)
    )
    assert not torch.equal(in_half(rows), in_full(rows))
    assert torch.equal(in_half(rows), in_full(rows.bfloat16()))


class _TimedKernels:
    """Kernels on a machine whose clock goes on by what a product takes: ten times as long while others disturb it."""

    def __init__(self, seconds: dict[str, float], disturbed: tuple[float, float]) -> None:
        self.now_s = 0.0
        self._seconds, self._disturbed = [*seconds.items()], disturbed

    def product_way(self, name: str) -> int | None:
        return next((place for place, (known, _) in enumerate(self._seconds) if known == name), None)

    def product(self, way: int, *_: object) -> None:
        began, ended = self._disturbed
        self.now_s += self._seconds[way][1] * (10 if began <= self.now_s < ended else 1)


@pytest.mark.parametrize("began_s", [0.0, 0.0005, 0.001, 0.003])
def test_a_pause_of_the_machine_changes_no_choice_of_a_way(began_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _TimedKernels({"dotted": 0.0002, "widened": 0.00015}, (began_s, began_s + 0.012))
    monkeypatch.setattr("time.perf_counter", lambda: machine.now_s)
    assert best_way.__wrapped__(machine, torch.bfloat16) == "dotted"


def test_every_way_can_be_timed() -> None:
    """Weights of int8 were tried with rows of int8, which were read as float32 beyond their end, and without scales."""
    kernels = built_kernels()
    for dtype, names in WAYS.items():
        here = [name for name in names if kernels.product_way(name) is not None]
        times = _least_seconds(_Checking(kernels), here, dtype)  # type: ignore[arg-type]
        assert [*times] == here
        assert all(0 < seconds < math.inf for seconds in times.values())


class _Checking:
    """Kernels that look at what they are handed: a product of it may be a fault of the process, or none by luck."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.product_way = kernels.product_way

    def product(
        self, way: int, rows: torch.Tensor, weights: torch.Tensor, bias: None, scales: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert rows.dtype in ROW_DTYPES
        assert (scales is not None) == (weights.dtype in (torch.int8, torch.uint8))
        return self._kernels.product(way, rows, weights, bias, scales)


def test_ways_that_give_the_same_bits_are_one_model() -> None:
    weight = QuantizedWeight.of(numbers(40, 64, seed=1), rounds_rows=True)
    assert {PackedWeight(weight, None, way).way for way in ways_of_rounded_rows()} == {"int8 rows"}


def test_a_way_that_is_clearly_faster_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _TimedKernels({"dotted": 0.0002, "widened": 0.0001}, (0.0, 0.0))
    monkeypatch.setattr("time.perf_counter", lambda: machine.now_s)
    assert best_way.__wrapped__(machine, torch.bfloat16) == "widened"
