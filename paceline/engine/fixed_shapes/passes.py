"""Passes over blocks: one pass over rows, or several steps of them.

It owns the recorded programs, one for each shape. Rows that fit no shape, such as a prompt, take `FastPasses`.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from paceline.engine.attention.tables import TableAttention
from paceline.engine.cache.paged import KvPool
from paceline.engine.fixed_shapes.recording import Recorder, Work
from paceline.engine.fixed_shapes.rows import (
    BLOCK_TOKENS,
    QUERY_COUNTS,
    ROW_COUNTS,
    BlockBuffer,
    BlockRows,
    BlockShape,
    HostRow,
    fitting_shape,
    most_rows,
)
from paceline.engine.fixed_shapes.steps import FirstStep, NextSteps
from paceline.engine.model.decoder import FeatureDecoder
from paceline.engine.model.model import LoadedModel
from paceline.engine.passes import FastPasses, Features, Piece
from paceline.engine.row_choice import RowRules, is_by_logits, up_to_none
from paceline.types import ChoiceRule

MAX_NEW_TOKENS = QUERY_COUNTS[-1]


class BlockPasses(FastPasses):
    def __init__(self, model: LoadedModel, cache: KvPool, features: Features | None = None) -> None:
        """The model's backend must have kernels for tables and for choices."""
        super().__init__(model, cache, features)
        assert model.backend.tables and model.backend.choices
        self._pool = cache
        self._tables, self._choices = model.backend.tables, model.backend.choices
        self._recorder = Recorder(cache.shape.device)
        self._passes: dict[BlockShape, _Pass] = {}
        self._next_steps: dict[BlockShape, NextSteps] = {}
        self._first_steps: dict[BlockShape, FirstStep] = {}

    @cached_property
    def _logits_memory(self) -> torch.Tensor:
        """All recorded passes write here, so that each of them need not keep memory for the logits of its shape."""
        size = BLOCK_TOKENS, self._model.description.vocabulary_size
        return torch.empty(size, device=self._recorder.device)

    @cached_property
    def _features_memory(self) -> torch.Tensor:
        """All recorded passes write features here, where something takes them: as `Features.take` has them."""
        assert self._features and isinstance(self._model.decoder, FeatureDecoder)
        size = self._model.decoder.hidden_size * (1 + len(self._features.tapped_layers))
        return torch.empty((BLOCK_TOKENS, size), device=self._recorder.device)

    @torch.inference_mode()
    def record(self, *, steps: bool) -> None:
        """Record the passes, or else the steps, of sequences that are not long; the largest shapes first.

        Raise MemoryError when there is too little for them: launched kernel by kernel they would take as much.
        """
        for query_count in reversed(QUERY_COUNTS):
            for row_count in reversed(ROW_COUNTS):
                if row_count <= most_rows(query_count):
                    shape = self._shape(row_count, query_count, longest=1)
                    (self._first_step if steps else self._pass)(shape)
        if self._recorder.lacks_memory:
            raise MemoryError("passes could not be recorded")
        if not steps:
            self._compile_choices()

    def _compile_choices(self) -> None:
        """Choose once, because kernels are compiled when they first run."""
        logits = self._logits_memory[:1].zero_()
        rules, positions = RowRules.empty(1, logits.device), torch.zeros(1, dtype=torch.int64, device=logits.device)
        self._choices.choose_rows(logits, rules, positions)

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        """Return each piece's logits [logit_count, V]. Short pieces are recorded, and others run beside them."""
        short = [index for index, piece in enumerate(pieces) if len(piece.token_ids) <= MAX_NEW_TOKENS]
        long = [index for index, piece in enumerate(pieces) if len(piece.token_ids) > MAX_NEW_TOKENS]
        found: dict[int, torch.Tensor] = {}
        size = most_rows(max((len(pieces[index].token_ids) for index in short), default=1))
        for start in range(0, len(short), size):
            part = short[start : start + size]
            found |= zip(part, self._run_recorded([pieces[index] for index in part]), strict=True)
        if long:
            found |= zip(long, super().run([pieces[index] for index in long]), strict=True)
        return [found[index] for index in range(len(pieces))]

    def _run_recorded(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        shape = self._shape_of(pieces, 0)
        logits = self._pass(shape).run([self._row(piece, 0) for piece in pieces])
        # The next replay overwrites them.
        logits = logits[: len(pieces)].clone()
        if self._features:
            self._features.take(pieces, self._features_of(pieces, shape.query_count))
        return [
            logits[row, len(piece.token_ids) - piece.logit_count : len(piece.token_ids)]
            for row, piece in enumerate(pieces)
        ]

    def _features_of(self, pieces: Sequence[Piece], query_count: int) -> torch.Tensor:
        """Return the features that the last recorded pass made of the pieces' tokens, as `Features` takes them."""
        assert self._features
        of_all = self._features.of_all
        stops = [row * query_count + len(piece.token_ids) for row, piece in enumerate(pieces)]
        counts = [len(piece.token_ids) if of_all else piece.logit_count for piece in pieces]
        return torch.cat(
            [self._features_memory[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
        )

    def can_step(self, token_count: int, rule: ChoiceRule) -> bool:
        return token_count <= MAX_NEW_TOKENS and is_by_logits(rule)

    def most_rows(self, token_count: int) -> int:
        return most_rows(token_count)

    @torch.inference_mode()
    def steps(self, pieces: Sequence[Piece], rules: Sequence[ChoiceRule], counts: Sequence[int]) -> list[list[int]]:
        step = self._first_step(self._shape_of(pieces, max(counts) - 1))
        counted = list(zip(pieces, counts, strict=True))
        made = step.run([self._row(piece, count - 1) for piece, count in counted], rules, counts).tolist()
        return [up_to_none(chosen[:count]) for count, chosen in zip(counts, made, strict=True)]

    def _shape_of(self, pieces: Sequence[Piece], later_count: int) -> BlockShape:
        """Return the shape that holds the pieces, with tables for `later_count` more tokens."""
        longest = max(piece.length for piece in pieces) + later_count
        return self._shape(len(pieces), max(len(piece.token_ids) for piece in pieces), longest)

    def _shape(self, row_count: int, query_count: int, longest: int) -> BlockShape:
        return fitting_shape(row_count, query_count, longest=longest, page_tokens=self._pool.page_tokens)

    def _row(self, piece: Piece, later_count: int) -> HostRow:
        page_count = -(-(piece.length + later_count) // self._pool.page_tokens)
        return HostRow(piece.token_ids, piece.base_length, self._pool.pages(piece.sequence_id)[:page_count])

    def _pass(self, shape: BlockShape) -> "_Pass":
        if shape not in self._passes:
            self._passes[shape] = _Pass(shape, self._all_logits, self._recorder)
        return self._passes[shape]

    def _first_step(self, shape: BlockShape) -> FirstStep:
        alone = BlockShape(shape.row_count, 1, shape.page_count)
        if alone not in self._next_steps:
            self._next_steps[alone] = NextSteps(alone, self._last_logits, self._choices, self._recorder)
        if shape not in self._first_steps:
            self._first_steps[shape] = FirstStep(shape, self._last_logits, self._next_steps[alone], self._recorder)
        return self._first_steps[shape]

    def _all_logits(self, rows: BlockRows) -> torch.Tensor:
        """Return the logits [N, Q, V] after every token."""
        count = rows.token_ids.numel()
        wanted = torch.arange(count, device=rows.token_ids.device)
        logits = self._logits_memory[:count].copy_(self._forward(rows, wanted))
        return logits.view(*rows.token_ids.shape, -1)

    def _last_logits(self, rows: BlockRows) -> torch.Tensor:
        """Return the logits [N, V] after each row's last real token."""
        return self._forward(rows, rows.last)

    def _forward(self, rows: BlockRows, wanted: torch.Tensor) -> torch.Tensor:
        max_length = self._model.description.max_length
        placed = rows.by_tables(self._pool.page_tokens, self._pool.shape.group_size, max_length)
        attention = TableAttention(self._pool.slots.memory, placed, self._tables)
        logits, features = self._made(rows.token_ids.reshape(1, -1), placed.positions[None], wanted, attention)
        if features is not None:
            self._features_memory[: len(features)].copy_(features)
        return logits


class _Pass:
    """The recorded pass of one shape."""

    def __init__(self, shape: BlockShape, logits: Callable[[BlockRows], torch.Tensor], recorder: Recorder) -> None:
        self._buffer = BlockBuffer(shape, recorder.device)
        self._replay: Work[torch.Tensor] = recorder.recorded(lambda: logits(self._buffer.rows))

    def run(self, rows: Sequence[HostRow]) -> torch.Tensor:
        """Return the logits [N, Q, V], in memory that the next replay overwrites."""
        self._buffer.fill(rows)
        return self._replay()
