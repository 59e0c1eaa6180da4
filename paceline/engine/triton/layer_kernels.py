"""Triton kernels of a layer between its products: sums and norms, positions and the cache, gates.

Each program computes one token, or a head or a part of one, in float32, so no result depends on other tokens. Results
are rounded to the dtype of the memory that they go to.
"""

import triton
import triton.language as tl

from paceline.engine.triton.order import await_earlier


@triton.jit
def add_and_norm_kernel(
    hidden, added, weight, normed, size, epsilon, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Add `added` to a token of `hidden` [T, N], in place, and store its root mean square norm in `normed`."""
    await_earlier(OVERLAPS)
    first = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    real = at < size
    total = tl.load(hidden + first + at, mask=real, other=0.0)
    if HAS_ADDED:
        total += tl.load(added + first + at, mask=real, other=0.0)
        tl.store(hidden + first + at, total, mask=real)
    scale = 1 / tl.sqrt(tl.sum(total * total, 0) / size + epsilon)
    tl.store(normed + first + at, total * scale * tl.load(weight + at, mask=real, other=0.0), mask=real)


@triton.jit
def gate_kernel(gate_and_up, gated, size, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Multiply the silu of the first half of a token's numbers [2 N] by the second half."""
    await_earlier(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    gate = tl.load(gate_and_up + 2 * token * size + at, mask=real, other=0.0)
    up = tl.load(gate_and_up + (2 * token + 1) * size + at, mask=real, other=0.0)
    tl.store(gated + token * size + at, gate / (1 + tl.exp(-gate)) * up, mask=real)


@triton.jit
def turned_head(source, norm, cosines, sines, epsilon, HALF: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr):
    """Return both halves of a head at `source`, normed and turned by a position's cosines and signed sines [2 HALF]."""
    at = tl.arange(0, BLOCK)
    real = at < HALF
    first = tl.load(source + at, mask=real, other=0.0)
    second = tl.load(source + HALF + at, mask=real, other=0.0)
    if HAS_NORM:
        scale = 1 / tl.sqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + epsilon)
        first = first * scale * tl.load(norm + at, mask=real, other=0.0)
        second = second * scale * tl.load(norm + HALF + at, mask=real, other=0.0)
    own = first * tl.load(cosines + at, mask=real, other=0.0) + second * tl.load(sines + at, mask=real, other=0.0)
    other = second * tl.load(cosines + HALF + at, mask=real, other=0.0)
    return own, other + first * tl.load(sines + HALF + at, mask=real, other=0.0)


@triton.jit
def store_key_and_value(keys, values, key, other_key, value, other_value, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Store the halves of a token's key and value in one head.

    What is no number in a value would reach queries that do not see it, for 0 times infinity is NaN. So it becomes a
    zero, and the key becomes NaN, which reaches the queries that see it and no others.
    """
    at = tl.arange(0, BLOCK)
    real = at < HALF
    infinity = float("inf")
    value = value.to(values.dtype.element_ty).to(tl.float32)
    other_value = other_value.to(values.dtype.element_ty).to(tl.float32)
    key, other_key = key.to(tl.float32), other_key.to(tl.float32)
    fits, other_fits = tl.abs(value) < infinity, tl.abs(other_value) < infinity
    wrong = tl.sum((real & ~(fits & other_fits)).to(tl.int32), 0) > 0
    tl.store(values + at, tl.where(fits, value, 0.0), mask=real)
    tl.store(values + HALF + at, tl.where(other_fits, other_value, 0.0), mask=real)
    tl.store(keys + at, tl.where(wrong, float("nan"), key), mask=real)
    tl.store(keys + HALF + at, tl.where(wrong, float("nan"), other_key), mask=real)


@triton.jit
def place_kernel(
    projected, query, keys, values, slots, positions, cosines, sines, query_norm, key_norm,
    epsilon, head_count, kv_head_count, slot_count,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Norm and turn one head of a token's queries, or of its keys, which goes to its slot together with the value.

    `projected` is [T, (H + 2 KV heads) * D], `query` [T, H, D]; `slots` [T] are -1 for padding, which is not stored.
    """
    await_earlier(OVERLAPS)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = 2 * HALF
    source = projected + (token * (head_count + 2 * kv_head_count) + head) * size
    turn = tl.load(positions + token) * size
    at = tl.arange(0, BLOCK)
    real = at < HALF
    if head < head_count:
        own, other = turned_head(source, query_norm, cosines + turn, sines + turn, epsilon, HALF, BLOCK, HAS_NORM)
        to = query + (token * head_count + head) * size
        tl.store(to + at, own, mask=real)
        tl.store(to + HALF + at, other, mask=real)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            own, other = turned_head(source, key_norm, cosines + turn, sines + turn, epsilon, HALF, BLOCK, HAS_NORM)
            source += kv_head_count * size
            value = tl.load(source + at, mask=real, other=0.0)
            other_value = tl.load(source + HALF + at, mask=real, other=0.0)
            to = ((head - head_count).to(tl.int64) * slot_count + slot) * size
            store_key_and_value(keys + to, values + to, own, other, value, other_value, HALF, BLOCK)


@triton.jit(do_not_specialize=["token_count"])
def store_kernel(
    key,
    value,
    keys,
    values,
    slots,
    token_count,
    slot_count,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Store a head of a token's key and value, which come as [KV heads, T, D]."""
    await_earlier(OVERLAPS)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        at = tl.arange(0, BLOCK)
        real = at < HALF
        source = (head * token_count + token) * 2 * HALF
        own, other = tl.load(key + source + at, mask=real), tl.load(key + source + HALF + at, mask=real)
        value_at = value + source
        own_value, other_value = tl.load(value_at + at, mask=real), tl.load(value_at + HALF + at, mask=real)
        to = (head * slot_count + slot) * 2 * HALF
        store_key_and_value(keys + to, values + to, own, other, own_value, other_value, HALF, BLOCK)
