"""Triton kernels of the rule of choice for many rows: temperature, noise and maximum in one reading of the logits.

See `engine.sampling` for the rule and `engine.noise` for the generator.
"""

import triton
import triton.language as tl


@triton.jit
def mixed(value):
    """Apply SplitMix64's finaliser."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def gumbel(seed, position, token_ids):
    """Return standard Gumbel noise in float64 of a seed at a position for some tokens; all are uint64."""
    start = mixed(mixed(seed) + position * 0x9E3779B97F4A7C15)
    bits = mixed(start + token_ids * 0x9E3779B97F4A7C15)
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def best(scores, token_ids, beyond):
    """Return the highest score and its token, the lowest among equals; `beyond` is more than any token."""
    highest = tl.max(scores, 0)
    return highest, tl.min(tl.where(scores == highest, token_ids, beyond), 0)


@triton.jit
def score_kernel(logits, temperatures, seeds, positions, scores, token_ids, size, BLOCK: tl.constexpr):
    """Store the best score and token of one block of a row of `logits` [N, V], in [N, blocks].

    NaN counts as infinity, of which no choice can be made either.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * size + at, mask=at < size, other=float("-inf")).to(tl.float32)
    noisy = score.to(tl.float64)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
        position = tl.load(positions + row).to(tl.uint64, bitcast=True)
        noisy = (score / temperature).to(tl.float64) + gumbel(seed, position, at.to(tl.uint64))
    noisy = tl.where(noisy == noisy, noisy, float("inf"))
    highest, token_id = best(noisy, at, size)
    place = row * tl.num_programs(1) + block
    tl.store(scores + place, highest)
    tl.store(token_ids + place, token_id)


@triton.jit
def choose_kernel(scores, token_ids, chosen, block_count, NO_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """Store a row's best token of all blocks; NO_TOKEN if its score is not finite."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < block_count
    score = tl.load(scores + row * block_count + at, mask=real, other=float("-inf"))
    token_id = tl.load(token_ids + row * block_count + at, mask=real, other=0)
    highest, choice = best(score, token_id, 0x7FFFFFFF)
    tl.store(chosen + row, tl.where(tl.abs(highest) < float("inf"), choice, NO_TOKEN).to(tl.int64))
