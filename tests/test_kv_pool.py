"""The KV pool against a plain list of tokens a sequence."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.engine.kv_pool import SLAB_STEP, KvPool, KvShape
from paceline.errors import Overloaded, PacelineError, PrefixNotCached, SequenceNotFound

SHAPE = KvShape(2, 1, 2, torch.float32, torch.device("cpu"))
SLAB_BYTES = SLAB_STEP * SHAPE.token_bytes
IDS = st.sampled_from("abcd")


def fill(pool: KvPool, sequence_id: str, values: list[float]) -> None:
    """Write the last tokens of every layer; a token's keys hold its value and its values the negative."""
    keys = torch.tensor(values)[None, None, :, None].expand(1, 1, -1, 2)
    for layer in range(SHAPE.layer_count):
        pool.write(layer, sequence_id, torch.stack((keys + layer, -keys - layer)))


def read(pool: KvPool, sequence_id: str, layer: int) -> tuple[list[float], list[float]]:
    keys, values = pool.write(layer, sequence_id, torch.empty(2, 1, 1, 0, 2))
    return keys[0, 0, :, 0].tolist(), values[0, 0, :, 0].tolist()


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = KvPool(SHAPE, 6 * SLAB_BYTES)
        self.truth: dict[str, list[float]] = {}
        self.written = 0.0

    @rule(sequence_id=IDS, base_length=st.integers(0, 200), count=st.integers(1, 150))
    def append(self, sequence_id: str, base_length: int, count: int) -> None:
        cached = self.truth.get(sequence_id, [])
        try:
            self.pool.append(sequence_id, base_length, count)
        except PacelineError as error:
            assert isinstance(error, PrefixNotCached if base_length > len(cached) else Overloaded)
            return
        values = [self.written + offset for offset in range(count)]
        self.written += count
        self.truth[sequence_id] = cached[:base_length] + values
        fill(self.pool, sequence_id, values)

    @rule(sequence_id=IDS, length=st.integers(0, 200))
    def truncate(self, sequence_id: str, length: int) -> None:
        cached = self.truth.get(sequence_id)
        try:
            self.pool.truncate(sequence_id, length)
        except PacelineError as error:
            assert isinstance(error, SequenceNotFound if cached is None else PrefixNotCached)
            assert cached is None or length > len(cached)
            return
        assert cached is not None
        del cached[length:]

    @rule(sequence_id=IDS)
    def release(self, sequence_id: str) -> None:
        assert self.pool.release(sequence_id) == (self.truth.pop(sequence_id, None) is not None)

    @invariant()
    def holds_what_was_written(self) -> None:
        assert self.pool.sequence_count == len(self.truth)
        for sequence_id, values in self.truth.items():
            assert self.pool.length(sequence_id) == len(values)
            for layer in range(SHAPE.layer_count):
                keys = [value + layer for value in values]
                assert read(self.pool, sequence_id, layer) == (keys, [-key for key in keys])

    @invariant()
    def stays_within_its_budget_and_leaks_nothing(self) -> None:
        assert 0 <= self.pool.used_bytes <= self.pool.capacity_bytes
        assert self.pool.used_bytes >= sum(map(len, self.truth.values())) * SHAPE.token_bytes
        assert self.truth or self.pool.used_bytes == 0


TestKvPool = PoolMachine.TestCase
TestKvPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_truncation_and_regrowth_within_it_copy_nothing() -> None:
    pool = KvPool(SHAPE, 4 * SLAB_BYTES)
    pool.append("a", 0, 50)
    before, _ = pool.write(0, "a", torch.empty(2, 1, 1, 0, 2))
    pool.truncate("a", 3)
    pool.append("a", 2, 40)
    after, _ = pool.write(0, "a", torch.empty(2, 1, 1, 0, 2))
    assert before.data_ptr() == after.data_ptr()


def test_a_full_pool_says_what_is_missing() -> None:
    pool = KvPool(SHAPE, SLAB_BYTES)
    pool.append("a", 0, 1)
    with pytest.raises(Overloaded, match=f"{SLAB_BYTES} of {SLAB_BYTES} are in use"):
        pool.append("b", 0, 1)
    pool.release("a")
    pool.append("b", 0, 1)
