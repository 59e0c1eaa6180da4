"""The noise of choices: it equals the documented function, is fair, and is finite for every seed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.noise import GOLDEN, gumbel
from paceline.engine.sampling import Choosing, choose
from paceline.types import ChoiceRule, SamplingParameters
from tests.engine.test_sampling import FALSE_ALARM
from tests.fairness import gumbel_p, rank_correlation_p

ALL_ONES = 2**64 - 1


def mix64(value: int) -> int:
    """Compute SplitMix64's finaliser with Python's own integers."""
    value &= 2**64 - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ (value >> 31)


def reference_noise(seed: int, position: int, token_id: int) -> float:
    bits = mix64(mix64(mix64(seed) + position * GOLDEN) + token_id * GOLDEN)
    return -math.log(-math.log(((bits >> 12) + 0.5) * 2.0**-52))


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**20))
def test_noise_is_the_documented_function_of_seed_position_and_token(seed: int, position: int, token_id: int) -> None:
    own = gumbel(seed, [position], torch.tensor([token_id])).item()
    assert own == pytest.approx(reference_noise(seed, position, token_id), rel=1e-12, abs=1e-12)


def test_splitmix64_gives_its_published_sequence() -> None:
    # The first outputs for the seed 1234567 in the reference implementation.
    outputs = [mix64(1234567 + count * GOLDEN) for count in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_or_the_company() -> None:
    whole = gumbel(7, [3, 4], torch.arange(1000))
    some = gumbel(7, [4], torch.tensor([[999, 5]]))
    assert some.tolist() == [[whole[1, 999].item(), whole[1, 5].item()]]


def test_noise_follows_the_gumbel_distribution_and_neighbours_are_independent() -> None:
    noise = gumbel(1, range(300), torch.arange(300))
    assert gumbel_p(noise) > FALSE_ALARM
    assert gumbel_p(noise + 0.05) < FALSE_ALARM
    other_seed = gumbel(2, range(300), torch.arange(300))
    for one, other in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:]), (noise, other_seed)):
        assert rank_correlation_p(one, other) > FALSE_ALARM
        assert rank_correlation_p(one, other + one / 50) < FALSE_ALARM


def unmix64(value: int) -> int:
    """Invert `mix64`: adding a shift's echoes undoes the shift; a factor's inverse undoes the odd factor."""
    value ^= value >> 31 ^ value >> 62
    value = value * pow(0x94D049BB133111EB, -1, 2**64) & ALL_ONES
    value ^= value >> 27 ^ value >> 54
    value = value * pow(0xBF58476D1CE4E5B9, -1, 2**64) & ALL_ONES
    return value ^ value >> 30 ^ value >> 60


def seed_with_bits(bits: int, position: int, token_id: int) -> int:
    """Return the seed that gives a token these bits at a position. A client may give any seed, even this one."""
    start = unmix64(bits) - token_id * GOLDEN & ALL_ONES
    return unmix64(unmix64(start) - position * GOLDEN & ALL_ONES)


EDGES = [ALL_ONES, ALL_ONES ^ 1, ALL_ONES << 11 & ALL_ONES, 2**63, 2**63 - 1, 2**12, 2**12 - 1, 0]


@pytest.mark.review  # review B1
@settings(deadline=None)
@given(st.sampled_from(EDGES) | st.integers(0, ALL_ONES), st.integers(0, 2**31 - 1), st.integers(0, 2**20))
def test_noise_is_finite_for_every_seed(bits: int, position: int, token_id: int) -> None:
    seed = seed_with_bits(bits, position, token_id)
    assert mix64(mix64(mix64(seed) + position * GOLDEN) + token_id * GOLDEN) == bits
    # Different loops compute one token alone and one among others.
    for others in (0, 1, 7):
        token_ids = torch.arange(token_id - others, token_id + others + 1)
        noise = gumbel(seed, [position], token_ids)
        assert (noise.isfinite() & (noise > -3.7) & (noise < 36.8)).all()


def test_the_largest_and_the_smallest_noise_are_those_of_the_extreme_bits() -> None:
    largest, smallest = [gumbel(seed_with_bits(bits, 5, 9), [5], torch.tensor([9])).item() for bits in (ALL_ONES, 0)]
    assert largest == pytest.approx(53 * math.log(2))
    assert smallest == pytest.approx(-math.log(53 * math.log(2)))


NOTHING = float("-inf")
BANNED = 11
RULINGS = {
    "an end token too early": SamplingParameters(temperature=1, min_new_tokens=9),
    "an end token too early, among few": SamplingParameters(temperature=1, min_new_tokens=9, top_k=12),
    "a bias of minus infinity": SamplingParameters(temperature=1, logit_bias=((BANNED, NOTHING),)),
    "top-k": SamplingParameters(temperature=1, top_k=3),
    "top-p": SamplingParameters(temperature=1, top_p=0.5),
    "min-p": SamplingParameters(temperature=0.5, min_p=0.9),
    "an end token too early, greedy": SamplingParameters(min_new_tokens=9),
    "a bias of minus infinity, greedy": SamplingParameters(logit_bias=((BANNED, NOTHING),)),
}


@pytest.mark.review  # review B1
@pytest.mark.parametrize("bits", [ALL_ONES, 0])
@pytest.mark.parametrize("ruling", RULINGS)
def test_no_seed_lets_a_token_win_that_is_ruled_out(ruling: str, bits: int) -> None:
    sampling = RULINGS[ruling]
    # The banned token is the likeliest if only its id rules it out, and the least likely if its logit does.
    by_name = sampling.min_new_tokens > 0 or bool(sampling.logit_bias)
    logits = torch.linspace(3, -3, 64).repeat(2, 1)
    logits[:, BANNED] = 9 if by_name else -9
    # The second row keeps more tokens, so the noise of the first row also covers tokens that are ruled out.
    logits[1, 20:40] = 3
    prefix = (1, 2, 3)
    for row in (0, 1):
        seed = seed_with_bits(bits, len(prefix) + row, BANNED)
        rule = ChoiceRule(sampling, seed, prompt_count=3, end_token_ids=(BANNED,))
        assert choose([Choosing(logits, rule, prefix, (4,))])[0][row] != BANNED


@pytest.mark.review  # review B1
def test_no_seed_lets_a_token_win_that_the_model_rules_out() -> None:
    logits = torch.zeros(1, 64)
    logits[0, BANNED] = NOTHING
    seed = seed_with_bits(ALL_ONES, 3, BANNED)
    assert choose([Choosing(logits, ChoiceRule(SamplingParameters(1), seed), (1, 2, 3))])[0][0] != BANNED
