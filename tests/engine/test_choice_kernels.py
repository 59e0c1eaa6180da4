"""The kernels that choose for many rows at once follow the rule of `engine.sampling`, row by row."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.row_choice import NO_TOKEN, ChoiceKernels, DeviceChooser, RowRules
from paceline.engine.sampling import Choice, Choosing, choose
from paceline.errors import InvalidRequest, NoChoice
from paceline.types import ChoiceRule, SamplingParameters
from tests.tools import triton_device, triton_runs

# The interpreter's numpy warns of hashes that overflow, as they are to.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
PREFIX = (1, 2, 3)
DEVICE = triton_device()


@pytest.fixture(scope="module")
def kernels() -> ChoiceKernels:
    triton_runs()
    from paceline.engine.triton import TritonChoices

    return TritonChoices()


def chosen(sequences: Sequence[Choosing], kernels: ChoiceKernels) -> list[list[Choice]]:
    there = [replace(one, logits=one.logits.to(DEVICE)) for one in sequences]
    return choose(there, DeviceChooser(kernels))


def chosen_alone(logits: torch.Tensor, rules: Sequence[ChoiceRule], prefixes: Sequence[Sequence[int]]) -> list[Choice]:
    return [
        choose([Choosing(logits[row : row + 1], rule, prefix)])[0][0]
        for row, (rule, prefix) in enumerate(zip(rules, prefixes, strict=True))
    ]


SAMPLINGS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.2, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 50, 4096, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
)


@settings(max_examples=8)
@given(
    samplings=st.lists(SAMPLINGS, min_size=1, max_size=3),
    size=st.sampled_from([1, 7, 1024, 5000]),
    spread=st.sampled_from([0.0, 0.5, 6.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_filters_temperature_and_noise_choose_as_torch_does(
    samplings: list[SamplingParameters], size: int, spread: float, seed: int, kernels: ChoiceKernels
) -> None:
    logits = spread * torch.randn(len(samplings), size, generator=torch.Generator().manual_seed(seed % 1000))
    rules = [ChoiceRule(sampling, seed ^ number) for number, sampling in enumerate(samplings)]
    sequences = [Choosing(logits[row : row + 1], rule, PREFIX) for row, rule in enumerate(rules)]
    assert chosen(sequences, kernels) == choose(sequences)


def test_equals_logits_that_are_no_number_and_rows_without_any_choose_as_alone(kernels: ChoiceKernels) -> None:
    logits = torch.randn(12, 2500, generator=torch.Generator().manual_seed(3))
    logits[9, 7] = logits[9, 2300] = 50  # equals in two blocks
    logits[10, 2400], logits[11], logits[7, 5], logits[8, :2000] = (
        float(one) for one in ("nan", "-inf", "inf", "-inf")
    )
    rules = [ChoiceRule(SamplingParameters((0, 0.5, 1.3)[n % 3], top_k=600 * (n % 2)), 7**n % 2**64) for n in range(12)]
    prefixes = [[1] * (n * 37 + 1) for n in range(12)]
    packed = RowRules.empty(12, DEVICE)
    packed.fill(rules)
    positions = torch.tensor([len(prefix) for prefix in prefixes], device=DEVICE)
    found = kernels.choose_rows(logits.to(DEVICE), packed, positions).tolist()
    alone = chosen_alone(logits, rules, prefixes)
    assert found == [one if isinstance(one, int) else NO_TOKEN for one in alone]
    assert found[9] == 7 and found[7] == found[10] == found[11] == NO_TOKEN


def test_scores_that_differ_little_or_are_signed_zeros_are_told_apart_as_numbers(kernels: ChoiceKernels) -> None:
    logits = torch.tensor([[0.0, -0.0, 1e-45, -1e-45, 1.0, 1.0 + 2**-23, -3e38, 3e38 - 3e38]])
    sequences = [
        Choosing(logits, ChoiceRule(SamplingParameters(1.0, top_k=top_k), seed), PREFIX)
        for top_k, seed in product(range(1, 9), range(2))
    ]
    assert chosen(sequences, kernels) == choose(sequences)


HISTORIES = {
    "repetition": SamplingParameters(1.0, top_p=0.5, repetition_penalty=1.5),
    "bias": SamplingParameters(0.7, top_k=9, logit_bias=((4, 9.0), (8, float("-inf")))),
    "early end": SamplingParameters(1.0, min_p=0.01, min_new_tokens=9),
    "early end, greedy": SamplingParameters(min_new_tokens=9),
}


def test_rules_that_know_earlier_tokens_and_others_are_chosen_in_their_order(kernels: ChoiceKernels) -> None:
    """Review B7: beside penalties top-p summed with another kernel for one row than for several."""
    logits = torch.randn(10, 300, generator=torch.Generator().manual_seed(4))
    logits[3, 9] = float("nan")
    logits[8:] = float("-inf")
    logits[8:, 7] = 1
    rules = [ChoiceRule(one, 5, 3, (7,)) for one in (SamplingParameters(), *HISTORIES.values())]
    sequences = [Choosing(logits[2 * n : 2 * n + 2], rule, PREFIX, (7,)) for n, rule in enumerate(rules)]
    found, expected = chosen(sequences, kernels), choose(sequences)
    for one, other in zip(sum(found, []), sum(expected, []), strict=True):
        assert (one == other) if isinstance(one, int) else (str(one) == str(other) and type(one) is type(other))
    assert isinstance(found[1][1], NoChoice) and isinstance(found[4][0], InvalidRequest)
    assert chosen([], kernels) == []
