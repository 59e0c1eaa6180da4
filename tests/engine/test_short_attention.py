"""The attention for short rows equals SDPA's, up to rounding, and runs only where it is faster and as precise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.attention.common import attend_one, causal_mask
from paceline.engine.attention.short import MAX_LENGTH, attend_short, is_short
from paceline.engine.interfaces import Span

SIZE = 8


@settings(max_examples=60)
@given(
    kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 4),
    count=st.integers(1, 16),
    before=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_rows_attend_as_sdpa_does(kv_heads: int, group_size: int, count: int, before: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def make(heads: int, tokens: int) -> torch.Tensor:
        # A view into a larger memory, like a row's keys and values.
        return torch.randn(heads, tokens + 9, SIZE, generator=generator).narrow(1, 4, tokens)

    lengths = [count + one for one in before]
    queries = [make(kv_heads * group_size, count) for _ in lengths]
    keys, values = ([make(kv_heads, length) for length in lengths] for _ in range(2))
    masks = [causal_mask(count, length, group_size, keys[0]) if count > 1 else None for length in lengths]
    attended = attend_short(queries, keys, values, masks, 0.3)
    for place, query in enumerate(queries):
        expected = attend_one(query, keys[place], values[place], masks[place], 0.3)
        assert torch.allclose(attended[place], expected.view(query.shape), atol=1e-5)


@pytest.mark.parametrize(
    ("count", "length", "dtype", "short"),
    [
        (1, MAX_LENGTH, torch.float32, True),
        (16, 17, torch.float32, True),
        (1, 1, torch.float32, True),
        (6, 6, torch.float32, False),
        (17, 40, torch.float32, False),
        (6, MAX_LENGTH + 1, torch.float32, False),
        (6, 40, torch.bfloat16, False),
    ],
)
def test_only_short_rows_of_short_sequences_in_float32(
    count: int, length: int, dtype: torch.dtype, short: bool
) -> None:
    assert is_short(Span("s", 3, 3 + count, length), torch.empty(0, dtype=dtype)) is short
