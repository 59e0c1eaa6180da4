"""One packed pass over the rows of a group, and the cache behind it.

Owns the order of things: make room for each row, run the model once, undo on failure. Knows nothing of drafting or
verifying. All calls come from one thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.engine.attention import PackedPass, Span, span_mask
from paceline.engine.kv_pool import KvPool
from paceline.engine.loader import LoadedModel
from paceline.errors import InvalidRequest, PacelineError
from paceline.types import ModelDescription, SequenceLength


@dataclass(frozen=True, slots=True)
class PackedRow:
    """New tokens of one sequence, to follow its first `base_length` cached ones."""

    sequence_id: str
    base_length: int
    token_ids: tuple[int, ...]
    logit_count: int = 1
    """Trailing tokens whose logits are wanted."""


class Runner:
    """A loaded model with its cache."""

    def __init__(self, model: LoadedModel, kv_memory_bytes: int) -> None:
        self.model = model
        self.pool = KvPool(model.kv_shape, kv_memory_bytes)

    def describe(self) -> ModelDescription:
        return replace(
            self.model.description,
            cache_capacity_bytes=self.pool.capacity_bytes,
            cache_used_bytes=self.pool.used_bytes,
            sequence_count=self.pool.sequence_count,
        )

    def forward(self, rows: Sequence[PackedRow]) -> list[torch.Tensor | PacelineError]:
        """Run the rows in one pass; return each row's last logits [logit_count, V], or why it could not run.

        Every row's cache then holds `base_length` plus its tokens. A row that finds no room leaves its cache as it
        was; when the pass itself fails, every row's cache is cut to `base_length`.
        """
        outcomes: dict[int, torch.Tensor | PacelineError] = {}
        placed: list[int] = []
        for index, row in enumerate(rows):
            try:
                self.pool.append(row.sequence_id, row.base_length, len(row.token_ids))
            except PacelineError as error:
                outcomes[index] = error
            else:
                placed.append(index)
        if placed:
            outcomes.update(zip(placed, self._run([rows[index] for index in placed]), strict=True))
        return [outcomes[index] for index in range(len(rows))]

    @torch.inference_mode()
    def _run(self, rows: Sequence[PackedRow]) -> Sequence[torch.Tensor]:
        try:
            logits = self.model.logits(*self._pack(rows))
        except BaseException:
            for row in rows:
                self.pool.truncate(row.sequence_id, row.base_length)
            raise
        return torch.split(logits, [row.logit_count for row in rows])

    def _pack(self, rows: Sequence[PackedRow]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PackedPass]:
        """Lay the rows end to end: token ids [1, T], positions [1, T], indices of wanted logits, and the spans."""
        shape = self.model.kv_shape
        token_ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        spans: list[Span] = []
        for row in rows:
            start, count = len(token_ids), len(row.token_ids)
            length = row.base_length + count
            token_ids += row.token_ids
            positions += range(row.base_length, length)
            wanted += range(start + count - row.logit_count, start + count)
            spans.append(
                Span(
                    row.sequence_id,
                    start,
                    start + count,
                    span_mask(count, length, self.model.group_count, shape.dtype, shape.device),
                    is_prefill=count == length,
                )
            )
        return (
            torch.tensor([token_ids], device=shape.device),
            torch.tensor([positions], device=shape.device),
            torch.tensor(wanted, device=shape.device),
            PackedPass(self.pool, spans),
        )

    def rollback(self, lengths: Iterable[SequenceLength]) -> list[int | PacelineError]:
        """Truncate each named sequence; return its cached length, or why it was left alone."""
        return [self._rollback_one(one) for one in lengths]

    def _rollback_one(self, one: SequenceLength) -> int | PacelineError:
        if one.length < 0:
            return InvalidRequest(f"length is {one.length}; it cannot be negative", field="length")
        try:
            self.pool.truncate(one.sequence_id, one.length)
        except PacelineError as error:
            return error
        return one.length

    def release(self, sequence_ids: Iterable[str]) -> int:
        """Free the named sequences; return how many were held."""
        return sum(self.pool.release(sequence_id) for sequence_id in sequence_ids)
