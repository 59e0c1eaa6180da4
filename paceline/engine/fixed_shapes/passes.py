"""Passes over blocks: one pass over rows, or all steps of a draft.

It owns the recorded programs, one for each shape. Rows that fit no shape, such as a prompt, take `FastPasses`.
"""

from collections.abc import Callable, Sequence

import torch

from paceline.checks import MAX_PROPOSED_COUNT
from paceline.engine.attention.tables import NO_TOKEN, TableAttention
from paceline.engine.cache.paged import KvPool
from paceline.engine.fixed_shapes.recording import Recorder, Work
from paceline.engine.fixed_shapes.rows import (
    QUERY_COUNTS,
    ROW_COUNTS,
    BlockBuffer,
    BlockRows,
    BlockShape,
    HostRow,
    fitting_shape,
)
from paceline.engine.model.model import LoadedModel
from paceline.engine.noise import signed64
from paceline.engine.passes import FastPasses, Piece
from paceline.types import ChoiceRule

MAX_NEW_TOKENS = QUERY_COUNTS[-1]
MAX_ROWS = ROW_COUNTS[-1]


class BlockPasses(FastPasses):
    def __init__(self, model: LoadedModel, cache: KvPool) -> None:
        """The model's backend must have kernels for tables."""
        super().__init__(model, cache)
        assert model.backend.tables
        self._pool = cache
        self._kernels = model.backend.tables
        self._recorder = Recorder(cache.shape.device)
        self._passes: dict[BlockShape, _Pass] = {}
        self._steps: dict[BlockShape, _Steps] = {}
        self._drafts: dict[BlockShape, _Draft] = {}

    @torch.inference_mode()
    def record(self, *, drafts: bool) -> None:
        """Record the passes of sequences that are not long, largest first, or those of drafts."""
        for row_count in reversed(ROW_COUNTS):
            for query_count in reversed(QUERY_COUNTS):
                shape = fitting_shape(row_count, query_count, longest=1, page_tokens=self._pool.page_tokens)
                assert shape
                (self._draft if drafts else self._pass)(shape)

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        """Return each piece's logits [logit_count, V]. Short pieces are recorded, and others run beside them."""
        short = [index for index, piece in enumerate(pieces) if len(piece.token_ids) <= MAX_NEW_TOKENS]
        long = [index for index, piece in enumerate(pieces) if len(piece.token_ids) > MAX_NEW_TOKENS]
        found: dict[int, torch.Tensor] = {}
        for start in range(0, len(short), MAX_ROWS):
            part = short[start : start + MAX_ROWS]
            found |= zip(part, self._run_recorded([pieces[index] for index in part]), strict=True)
        if long:
            found |= zip(long, super().run([pieces[index] for index in long]), strict=True)
        return [found[index] for index in range(len(pieces))]

    def _run_recorded(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        logits = self._pass(self._shape(pieces, 0)).run([self._row(piece, 0) for piece in pieces])
        # The logits are copied, because the next replay overwrites them.
        return [
            logits[row, len(piece.token_ids) - piece.logit_count : len(piece.token_ids)].clone()
            for row, piece in enumerate(pieces)
        ]

    @torch.inference_mode()
    def draft(
        self, pieces: Sequence[Piece], rules: Sequence[ChoiceRule], draft_counts: Sequence[int]
    ) -> list[list[int]]:
        """Return `draft_counts` choices after each piece, each choice made after the ones before; fewer if one fails.

        The cache must have room for all of a piece's choices but the last, and holds them afterwards. There are as many
        steps as the largest count; a piece with a smaller count computes on, and stores nothing.
        """
        draft = self._draft(self._shape(pieces, max(draft_counts) - 1))
        counted = list(zip(pieces, draft_counts, strict=True))
        made = draft.run([self._row(piece, count - 1) for piece, count in counted], rules, draft_counts)
        return [
            self._settle(piece, drafts[:count]) for (piece, count), drafts in zip(counted, made.tolist(), strict=True)
        ]

    def _settle(self, piece: Piece, drafts: list[int]) -> list[int]:
        """Write the draft tokens into the cache, up to the first that could not be chosen, and return them."""
        made = drafts[: drafts.index(NO_TOKEN)] if NO_TOKEN in drafts else drafts
        self._pool.truncate(piece.sequence_id, piece.length + max(0, len(made) - 1))
        self._pool.fill(piece.sequence_id, made[:-1])
        return made

    def _shape(self, pieces: Sequence[Piece], later_count: int) -> BlockShape:
        """Return the shape that holds the pieces, with tables for `later_count` more tokens."""
        longest = max(piece.length for piece in pieces) + later_count
        query_count = max(len(piece.token_ids) for piece in pieces)
        shape = fitting_shape(len(pieces), query_count, longest=longest, page_tokens=self._pool.page_tokens)
        assert shape, "more rows or tokens than a block holds"
        return shape

    def _row(self, piece: Piece, later_count: int) -> HostRow:
        page_count = -(-(piece.length + later_count) // self._pool.page_tokens)
        return HostRow(piece.token_ids, piece.base_length, self._pool.pages(piece.sequence_id)[:page_count])

    def _pass(self, shape: BlockShape) -> "_Pass":
        if shape not in self._passes:
            self._passes[shape] = _Pass(shape, self._all_logits, self._recorder)
        return self._passes[shape]

    def _draft(self, shape: BlockShape) -> "_Draft":
        alone = BlockShape(shape.row_count, 1, shape.page_count)
        if alone not in self._steps:
            self._steps[alone] = _Steps(alone, self._last_logits, self._kernels.choose_rows, self._recorder)
        if shape not in self._drafts:
            self._drafts[shape] = _Draft(shape, self._last_logits, self._steps[alone], self._recorder)
        return self._drafts[shape]

    def _all_logits(self, rows: BlockRows) -> torch.Tensor:
        """Return the logits [N, Q, V] after every token."""
        wanted = torch.arange(rows.token_ids.numel(), device=rows.token_ids.device)
        return self._forward(rows, wanted).view(*rows.token_ids.shape, -1)

    def _last_logits(self, rows: BlockRows) -> torch.Tensor:
        """Return the logits [N, V] after each row's last real token."""
        return self._forward(rows, rows.last)

    def _forward(self, rows: BlockRows, wanted: torch.Tensor) -> torch.Tensor:
        max_length = self._model.description.max_length
        placed = rows.by_tables(self._pool.page_tokens, self._pool.shape.group_size, max_length)
        attention = TableAttention(self._pool.memory, placed, self._kernels)
        return self._model.decoder.logits(rows.token_ids.reshape(1, -1), placed.positions[None], wanted, attention)


class _Pass:
    """The recorded pass of one shape."""

    def __init__(self, shape: BlockShape, logits: Callable[[BlockRows], torch.Tensor], recorder: Recorder) -> None:
        self._buffer = BlockBuffer(shape, recorder.device)
        self._replay: Work[torch.Tensor] = recorder.recorded(lambda: logits(self._buffer.rows))

    def run(self, rows: Sequence[HostRow]) -> torch.Tensor:
        """Return the logits, in memory that the next replay overwrites."""
        self._buffer.fill(rows)
        return self._replay()


class _Steps:
    """The drafts of some rows, and the recorded step that makes one more for each. Nothing of it is on the host."""

    def __init__(
        self,
        shape: BlockShape,
        last_logits: Callable[[BlockRows], torch.Tensor],
        choose: Callable[..., torch.Tensor],
        recorder: Recorder,
    ) -> None:
        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=recorder.device)

        row_count = shape.row_count
        self._choose = choose
        self.seeds, self.draft_counts = zeros(row_count), zeros(row_count)
        self.temperatures = torch.zeros(row_count, device=recorder.device)
        self.drafts = zeros(row_count, MAX_PROPOSED_COUNT)
        self._made_count = zeros(1)
        self._rows = BlockRows(
            zeros(row_count, 1), zeros(row_count), zeros(row_count), zeros(row_count, shape.page_count)
        )
        self.replay: Work[None] = recorder.recorded(lambda: self.add(self._rows, last_logits(self._rows)))

    def begin(self, rows: BlockRows, logits: torch.Tensor) -> None:
        """Make the first drafts, from the logits [N, V] after all tokens of `rows`."""
        self._made_count.zero_()
        self._rows.tables.copy_(rows.tables)
        self.add(rows, logits)

    def add(self, rows: BlockRows, logits: torch.Tensor) -> None:
        """Choose a draft of each row, and make it the one token of the row's next step, if it wants more drafts."""
        lengths = rows.bases + rows.counts
        chosen = self._choose(logits, self.temperatures, self.seeds, lengths)
        self.drafts.index_copy_(1, self._made_count, chosen[:, None])
        self._made_count += 1
        # A row without a choice has failed, so any token will do for it. A row of no tokens stores nothing.
        self._rows.token_ids.copy_(chosen.clamp_min(0)[:, None])
        self._rows.bases.copy_(lengths)
        self._rows.counts.copy_(rows.counts.clamp_max(1) * (self._made_count < self.draft_counts))


class _Draft:
    """Drafts after rows of one shape: a recorded first pass, and a step that is replayed for each further draft."""

    def __init__(
        self, shape: BlockShape, last_logits: Callable[[BlockRows], torch.Tensor], steps: _Steps, recorder: Recorder
    ) -> None:
        self._buffer = BlockBuffer(shape, recorder.device)
        self._steps = steps
        self._begin: Work[None] = recorder.recorded(
            lambda: steps.begin(self._buffer.rows, last_logits(self._buffer.rows))
        )

    def run(self, rows: Sequence[HostRow], rules: Sequence[ChoiceRule], draft_counts: Sequence[int]) -> torch.Tensor:
        """Return the drafts [N, draft_count], `NO_TOKEN` where none can be made; beyond a row's count they are none."""
        steps, count = self._steps, len(rows)
        self._buffer.fill(rows)
        steps.seeds[:count] = torch.tensor([signed64(rule.seed) for rule in rules])
        steps.temperatures[:count] = torch.tensor([rule.sampling.temperature for rule in rules])
        steps.draft_counts[:count] = torch.tensor(draft_counts)
        self._begin()
        for _ in range(max(draft_counts) - 1):
            steps.replay()
        return steps.drafts[:count, : max(draft_counts)]
