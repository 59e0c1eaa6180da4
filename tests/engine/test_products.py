"""Our products in bfloat16 equal torch's in float32, up to rounding, and no row's result depends on another row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.native import HalfWeight, can_multiply, find_kernels
from paceline.engine.native.kernels import product_rows
from paceline.engine.native.products import WAYS, best_way
from paceline.engine.threads import using_threads
from tests.tools import missing


def ways() -> list[str]:
    kernels = find_kernels()
    if kernels is None:
        missing("the kernels were not built; scripts/compiler installs a compiler, then remove .venv")
    found = [way for way in WAYS if kernels.has_product(way)]
    assert "widened" in found and best_way(kernels) in found
    return found


def halves(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@settings(max_examples=60)
@given(
    row_count=st.integers(1, 70),
    steps=st.integers(1, 9),
    column_count=st.integers(1, 100),
    has_bias=st.booleans(),
    thread_count=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_products_are_torchs(
    row_count: int, steps: int, column_count: int, has_bias: bool, thread_count: int, seed: int
) -> None:
    weight, rows = halves(column_count, 32 * steps, seed=seed), halves(row_count, 32 * steps, seed=seed + 1)
    bias = halves(column_count, seed=seed + 2) if has_bias else None
    expected = rows.float() @ weight.float().T + (0 if bias is None else bias.float())
    for way in ways():
        with using_threads(thread_count):
            found = HalfWeight(weight, bias, way)(rows)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("column_count", "size"), [(64, 96), (48, 2112), (1040, 4128)])
def test_a_row_has_the_same_result_among_any_rows_and_with_any_number_of_threads(column_count: int, size: int) -> None:
    weight, rows = halves(column_count, size, seed=1), halves(70, size, seed=2)
    for way in ways():
        multiply = HalfWeight(weight, halves(column_count, seed=3), way)
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


def test_what_is_no_number_stays_in_its_row() -> None:
    weight, rows = halves(40, 64, seed=1), halves(20, 64, seed=2)
    for way in ways():
        multiply = HalfWeight(weight, None, way)
        expected = multiply(rows)
        touched = rows.clone()
        touched[7, 5] = float("inf")
        found = multiply(touched)
        assert not found[7].isfinite().any()
        assert torch.equal(found[[*range(7), *range(8, 20)]], expected[[*range(7), *range(8, 20)]])


def test_rows_of_another_dtype_or_without_memory_after_them_are_copied() -> None:
    weight, rows = halves(40, 64, seed=1), halves(34, 64, seed=2)
    multiply = HalfWeight(weight, None)
    expected = multiply(product_rows(34, 64, torch.bfloat16).copy_(rows))
    for one in (rows, rows.float(), rows.repeat(1, 2)[:, :64], torch.cat((rows, rows))[34:]):
        assert torch.equal(multiply(one), expected)


def test_only_bfloat16_rows_of_whole_steps_are_multiplied_here() -> None:
    assert can_multiply(torch.ones(3, 64, dtype=torch.bfloat16)) == bool(find_kernels())
    assert not can_multiply(torch.ones(3, 48, dtype=torch.bfloat16))
    assert not can_multiply(torch.ones(3, 64, dtype=torch.float16))
