"""Triton kernels of attention over pages, for prompts and drafts alike.

The keys of a sequence are cut every SPLIT keys, wherever it lies and whatever else is computed, and each part is read
by a program of its own (Flash-Decoding). A query's parts are joined in order. So a result depends on the query, its
position and its own sequence alone. What differs from pass to pass is not specialised: there is one program for all
passes of a model, and none is compiled while requests wait.
"""

import triton
import triton.language as tl

from paceline.engine.triton.order import await_earlier


@triton.jit(do_not_specialize=["own_count", "first_kv_head", "page_count", "split_count"])
def attend_kernel(
    query, keys, values, tiles, tables, sums, weights,
    scaling, head_count, own_count, first_kv_head, slot_count, page_count, split_count,
    HEAD_SIZE: tl.constexpr, HEAD_BLOCK: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, STEP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Attend with up to QUERIES neighbouring queries of the GROUP heads of a KV head to one part of their keys.

    A tile is: its first token, its number of queries, the position of the first, its row's place in `tables` [N, P].
    `sums` [T, O, splits, D] gets the sums of values, `weights` [T, O, splits, 2] the highest score and the sum of
    exponentials, of O heads from that of `first_kv_head` on.
    """
    await_earlier(OVERLAPS)
    tile, own_kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = first_kv_head + own_kv_head
    first, count = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    position, table = tl.load(tiles + 4 * tile + 2), tables + tl.load(tiles + 4 * tile + 3) * page_count
    length = position + count
    start = split * SPLIT
    if (count > 0) & (start < length):
        row = tl.arange(0, ROWS)
        number = row // GROUP
        real = number < tl.minimum(count, QUERIES)
        asked = (first + number) * head_count + kv_head * GROUP + row % GROUP
        at = tl.arange(0, HEAD_BLOCK)
        is_head = at < HEAD_SIZE
        own = tl.load(query + asked[:, None] * HEAD_SIZE + at, mask=real[:, None] & is_head, other=0.0)
        total = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        for step in range(start, tl.minimum(start + SPLIT, length), STEP):
            key_at = step + tl.arange(0, STEP)
            held = key_at < length
            page = tl.load(table + key_at // PAGE_TOKENS, mask=held, other=0)
            slot = kv_head.to(tl.int64) * slot_count + page * PAGE_TOKENS + key_at % PAGE_TOKENS
            place, is_read = slot[:, None] * HEAD_SIZE + at, held[:, None] & is_head
            key = tl.load(keys + place, mask=is_read, other=0.0)
            score = tl.dot(own, tl.trans(key), input_precision="ieee") * scaling
            score = tl.where(key_at[None, :] <= (position + number)[:, None], score, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(score, 1))
            # Where nothing was seen so far, minus infinity less itself would be NaN.
            less = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            kept, part = tl.exp(highest - less), tl.exp(score - less[:, None])
            value = tl.load(values + place, mask=is_read, other=0.0)
            total = total * kept[:, None] + tl.dot(part.to(value.dtype), value, input_precision="ieee")
            weight = weight * kept + tl.sum(part, 1)
            highest = new_highest
        result = ((first + number) * own_count + own_kv_head * GROUP + row % GROUP) * split_count + split
        tl.store(sums + result[:, None] * HEAD_SIZE + at, total, mask=real[:, None] & is_head)
        tl.store(weights + 2 * result, highest, mask=real)
        tl.store(weights + 2 * result + 1, weight, mask=real)


@triton.jit(do_not_specialize=["own_count", "first_head", "split_count"])
def combine_kernel(
    sums, weights, positions, slots, attended, head_count, own_count, first_head, split_count,
    HEAD_SIZE: tl.constexpr, HEAD_BLOCK: tl.constexpr, SPLIT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Join the parts of one query in one head, in order, and store the result in `attended` [T, H, D].

    Padding, whose slot is -1, has no parts and gets zeros.
    """
    await_earlier(OVERLAPS)
    token, own_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, result = token * own_count + own_head, token * head_count + first_head + own_head
    at = tl.arange(0, HEAD_BLOCK)
    real = at < HEAD_SIZE
    total = tl.zeros((HEAD_BLOCK,), tl.float32)
    highest, weight = float("-inf"), 0.0
    part_count = tl.minimum(tl.load(positions + token) // SPLIT + 1, split_count)
    for split in range(tl.where(tl.load(slots + token) < 0, 0, part_count)):
        part = source * split_count + split
        own_highest = tl.load(weights + 2 * part)
        new_highest = tl.maximum(highest, own_highest)
        less = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        kept, own = tl.exp(highest - less), tl.exp(own_highest - less)
        total = total * kept + tl.load(sums + part * HEAD_SIZE + at, mask=real, other=0.0) * own
        weight = weight * kept + tl.load(weights + 2 * part + 1) * own
        highest = new_highest
    tl.store(attended + result * HEAD_SIZE + at, total / tl.where(weight == 0, 1.0, weight), mask=real)
