"""The parameters of a request: tokens left by its filters, and logits changed by its penalties."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, overload

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from paceline.engine.sampling import Choosing, choose, filtered, processed
from paceline.types import ChoiceRule, SamplingParameters


@settings(max_examples=100)
@given(st.integers(0, 20), st.floats(0.05, 1), st.floats(0, 0.5), st.integers(0, 10**6))
def test_filters_leave_the_tokens_that_transformers_leaves(top_k: int, top_p: float, min_p: float, seed: int) -> None:
    torch.manual_seed(seed)
    scores = torch.randn(3, 20) * 3
    left = filtered(scores, SamplingParameters(1, top_k=top_k, top_p=top_p, min_p=min_p)) > -math.inf
    warpers: list[Any] = [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    expected = scores
    for warper in warpers:
        expected = warper(None, expected)
    assert torch.equal(left, expected > -math.inf)


@pytest.mark.parametrize("spread", [0.1, 1.5, 4])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.9999])
@pytest.mark.parametrize("top_k", [0, 30, 2000])
def test_a_nucleus_of_any_size_is_the_one_that_transformers_leaves(spread: float, top_p: float, top_k: int) -> None:
    """Compare in float64, where the order of adding probabilities does not matter."""
    torch.manual_seed(6)
    scores = (torch.randn(3, 12_000, dtype=torch.float64) * spread).round(decimals=1 if spread > 1 else 9)
    left = filtered(scores, SamplingParameters(1, top_k=top_k, top_p=top_p)) > -math.inf
    warped = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    kept = TopPLogitsWarper(top_p)(None, warped)
    # Tokens as likely as the last one kept stay too.
    least = kept.masked_fill(kept == -math.inf, math.inf).amin(-1, keepdim=True)
    assert torch.equal(left, scores >= least)


NUCLEUS = SamplingParameters(1, top_p=0.9)


@pytest.mark.parametrize("thread_count", [1, 2])
def test_what_is_left_of_a_row_does_not_depend_on_the_other_rows(thread_count: int) -> None:
    torch.manual_seed(7)
    # Some rows need a few tokens and some need all, with many equals.
    spreads = torch.tensor([8, 4, 2, 1, 0.01, 0])
    rows = (torch.randn(6, 40_001) * spreads[:, None]).round(decimals=1)
    before = torch.get_num_threads()
    torch.set_num_threads(thread_count)
    try:
        together = filtered(rows, NUCLEUS)
        for row in range(6):
            assert torch.equal(filtered(rows[row : row + 1], NUCLEUS)[0], together[row])
    finally:
        torch.set_num_threads(before)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.review  # review B10
def test_the_vocabulary_is_sorted_only_where_the_nucleus_is_large() -> None:
    torch.manual_seed(8)
    for spread, sorts in ((6, False), (3, False), (0.01, True)):
        with Operators() as ran:
            filtered(torch.randn(2, 40_000) * spread, NUCLEUS)
        assert ("aten::sort" in ran.names) == sorts


def choice(logits: list[float], sampling: SamplingParameters, prefix: tuple[int, ...], prompt_count: int) -> int:
    rule = ChoiceRule(sampling, prompt_count=prompt_count, end_token_ids=(0,))
    found = choose([Choosing(torch.tensor([logits]), rule, prefix)])[0][0]
    assert isinstance(found, int)
    return found


def test_each_adjustment_does_what_it_says() -> None:
    logits = [4.0, 3.9, 3.0]
    assert choice(logits, SamplingParameters(), (1, 2), 1) == 0
    assert choice(logits, SamplingParameters(logit_bias=((2, 1.5),)), (1, 2), 1) == 2
    assert choice(logits, SamplingParameters(repetition_penalty=2), (0, 1), 1) == 2
    assert choice(logits, SamplingParameters(presence_penalty=0.5), (1, 0), 1) == 1
    assert choice(logits, SamplingParameters(presence_penalty=0.5), (0, 2), 1) == 0
    assert choice(logits, SamplingParameters(frequency_penalty=0.06), (9, 0), 1) == 0
    assert choice(logits, SamplingParameters(frequency_penalty=0.06), (9, 0, 0), 1) == 1
    assert choice(logits, SamplingParameters(min_new_tokens=2), (5, 1), 1) == 1
    assert choice(logits, SamplingParameters(min_new_tokens=2), (5, 1, 1), 1) == 0


PENALTIES = [
    SamplingParameters(repetition_penalty=1.3),
    SamplingParameters(repetition_penalty=0.7),
    SamplingParameters(presence_penalty=0.5),
    SamplingParameters(frequency_penalty=-0.3),
    SamplingParameters(repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.1),
]
token_lists = st.lists(st.integers(0, 29), max_size=12)


def penalised(logits: torch.Tensor, sampling: SamplingParameters, prompt_count: int, history: list[int]) -> list[float]:
    """Return the logits [V] after `history`, by the definition of the three penalties."""
    values = logits.clone()
    for token_id in set(history):
        factor = sampling.repetition_penalty
        values[token_id] = values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
    for token_id, count in Counter(history[prompt_count:]).items():
        values[token_id] -= torch.tensor(sampling.presence_penalty) + sampling.frequency_penalty * torch.tensor(count)
    return values.tolist()


@settings(max_examples=50)
@given(st.sampled_from(PENALTIES), token_lists, token_lists, st.integers(0, 15))
def test_penalties_follow_from_the_tokens_before_each_position(
    sampling: SamplingParameters, prefix: list[int], following: list[int], prompt_count: int
) -> None:
    torch.manual_seed(9)
    logits = torch.randn(len(following) + 1, 30)
    found = processed(Choosing(logits, ChoiceRule(sampling, prompt_count=prompt_count), prefix, following))
    for row in range(len(following) + 1):
        expected = penalised(logits[row], sampling, prompt_count, [*prefix, *following[:row]])
        assert found[row].tolist() == expected


class CountedTokens(Sequence[int]):
    """Tokens that count how many of them were read."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self.read_count = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        self.read_count += 1
        return self._token_ids[index]


@pytest.mark.review  # review B10
@pytest.mark.parametrize("sampling", PENALTIES)
def test_a_long_history_is_read_no_oftener_for_many_positions_than_for_one(sampling: SamplingParameters) -> None:
    def read_count(following: Sequence[int]) -> int:
        prefix = CountedTokens(range(1000))
        processed(Choosing(torch.randn(len(following) + 1, 1000), ChoiceRule(sampling), prefix, following))
        return prefix.read_count

    assert read_count(range(15)) == read_count(()) >= 1000
