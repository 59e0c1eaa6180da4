"""Triton kernels of the rule of choice for many rows: filters, temperature, noise and maximum.

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
def placed(score):
    """Return integers in the order of float32 numbers, so that a number can be sought bit by bit."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_at(place):
    """Undo `placed`."""
    return (place ^ ((place >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_from(logits, size, temperature, highest, least, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the scores of a row that are at least `least`: their number, or else their `exp(score - highest)`."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = tl.load(logits + at, mask=at < size, other=float("-inf")).to(tl.float32)
        score = tl.div_rn(score, temperature)
        counts = (at < size) & (score >= least)
        if BY_COUNT:
            total += counts.to(tl.float64)
        else:
            total += tl.where(counts, tl.exp(score - highest), 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def highest_from(logits, size, temperature, highest, least, wanted, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the highest score from which on the scores add up to `wanted`; but no less than `least`."""
    low, high = placed(least).to(tl.int64), placed(highest).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        found = weight_from(logits, size, temperature, highest, number_at(middle.to(tl.int32)), BY_COUNT, BLOCK)
        if found >= wanted:
            low = middle
        else:
            high = middle - 1
    return number_at(low.to(tl.int32))


@triton.jit
def least_kernel(logits, rules, least, size, BLOCK: tl.constexpr):
    """Store the least score that top-k, then top-p, then min-p leave of each row of `logits` [N, V].

    One program reads a row in one order, so the result depends on that row alone. `rules` are those of `RowRules`.
    A row without a finite highest score has no choice, so anything is stored for it.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(rules + 4 * row).to(tl.float32), tl.load(rules + 4 * row + 1)
    top_p, log_min_p = tl.load(rules + 4 * row + 2), tl.load(rules + 4 * row + 3).to(tl.float32)
    is_top_k, is_top_p = (top_k > 0) & (top_k < size), top_p < 1
    end = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0) & (is_top_k | is_top_p | (log_min_p > float("-inf"))):
        own = logits + row * size
        tops = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tops = tl.maximum(tops, tl.load(own + at, mask=at < size, other=float("-inf")).to(tl.float32))
        highest = tl.div_rn(tl.max(tops, 0), temperature)
        if tl.abs(highest) < float("inf"):
            if is_top_k:
                end = highest_from(own, size, temperature, highest, end, top_k, True, BLOCK)
            if is_top_p:
                wanted = top_p * weight_from(own, size, temperature, highest, end, False, BLOCK)
                end = highest_from(own, size, temperature, highest, end, wanted, False, BLOCK)
            end = tl.maximum(end, highest + log_min_p)
    tl.store(least + row, end)


@triton.jit
def score_kernel(logits, rules, seeds, positions, least, scores, token_ids, size, BLOCK: tl.constexpr):
    """Store the best score and token of one block of a row of `logits` [N, V], in [N, blocks].

    `rules` and `seeds` are those of `RowRules`, `least` [N] that of `least_kernel`. NaN counts as infinity, of which no
    choice can be made either.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * size + at, mask=at < size, other=float("-inf")).to(tl.float32)
    noisy = score.to(tl.float64)
    temperature = tl.load(rules + 4 * row).to(tl.float32)
    if temperature > 0:
        score = tl.div_rn(score, temperature)
        seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
        position = tl.load(positions + row).to(tl.uint64, bitcast=True)
        noisy = score.to(tl.float64) + gumbel(seed, position, at.to(tl.uint64))
        noisy = tl.where(score < tl.load(least + row), float("-inf"), noisy)
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
