"""Passes over blocks: one pass over rows, or all steps of a draft at once.

It owns the recorded programs, one for each shape. Rows that fit no shape, such as a prompt, take `FastPasses`.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from paceline.engine.cache.paged import KvPool
from paceline.engine.fixed_shapes.attention import BlockAttention, KernelMaker
from paceline.engine.fixed_shapes.choice import NO_TOKEN, choose_rows, coded
from paceline.engine.fixed_shapes.kernels import choose_kernel, find_varlen
from paceline.engine.fixed_shapes.recording import Work, recorded
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
        """`cache` must have a scratch page."""
        super().__init__(model, cache)
        assert cache.scratch_page is not None
        self._pool = cache
        self._scratch_page = cache.scratch_page
        self._programs: dict[BlockShape, _Pass] = {}
        self._drafts: dict[tuple[BlockShape, int, bool], _Draft] = {}

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        """Return each piece's logits [logit_count, V]."""
        shape = self._shape(pieces, 0)
        if shape is None:
            return super().run(pieces)
        program = self._programs.get(shape)
        if program is None:
            program = self._programs[shape] = _Pass(shape, self._device, self._scratch_page, self._all_logits)
        logits = program.run([self._row(piece, 0) for piece in pieces])
        # The logits are copied, because the next pass of this shape overwrites them.
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
        steps as the largest count; a piece with a smaller count then writes behind its end or to the scratch page.
        """
        step_count = max(draft_counts)
        shape = self._shape(pieces, step_count - 1)
        assert shape is not None, "more rows or tokens than a block holds"
        is_sampled = any(rule.sampling.temperature > 0 for rule in rules)
        key = (shape, step_count, is_sampled)
        program = self._drafts.get(key)
        if program is None:
            program = self._drafts[key] = _Draft(
                shape, self._device, self._scratch_page, self._last_logits, step_count, is_sampled
            )
        counted = list(zip(pieces, draft_counts, strict=True))
        chosen = program.run([self._row(piece, count - 1) for piece, count in counted], rules)
        made = chosen[: len(pieces)].tolist()
        return [self._settle(piece, drafts[:count]) for (piece, count), drafts in zip(counted, made, strict=True)]

    def _settle(self, piece: Piece, drafts: list[int]) -> list[int]:
        """Write the draft tokens into the cache, up to the first that could not be chosen, and return them."""
        made = drafts[: drafts.index(NO_TOKEN)] if NO_TOKEN in drafts else drafts
        self._pool.truncate(piece.sequence_id, piece.length + max(0, len(made) - 1))
        self._pool.fill(piece.sequence_id, made[:-1])
        return made

    @cached_property
    def _kernel(self) -> KernelMaker:
        return choose_kernel(self._pool.shape, self._pool.page_tokens, find_varlen())

    @property
    def _device(self) -> torch.device:
        return self._pool.shape.device

    def _shape(self, pieces: Sequence[Piece], later_count: int) -> BlockShape | None:
        """Return the shape that holds the pieces, with tables for `later_count` more tokens; None if there is none."""
        return fitting_shape(
            len(pieces),
            max(len(piece.token_ids) for piece in pieces),
            longest_base=max(piece.base_length for piece in pieces),
            later_count=later_count,
            page_tokens=self._pool.page_tokens,
        )

    def _page_count(self, length: int) -> int:
        return -(-length // self._pool.page_tokens)

    def _row(self, piece: Piece, later_count: int) -> HostRow:
        pages = self._pool.pages(piece.sequence_id)[: self._page_count(piece.length + later_count)]
        return HostRow(piece.token_ids, piece.base_length, pages)

    def _all_logits(self, rows: BlockRows) -> torch.Tensor:
        """Return the logits [N, Q, V] of all tokens, padding included."""
        token_count = rows.token_ids.numel()
        logits = self._forward(rows, torch.arange(token_count, device=self._device))
        return logits.view(*rows.token_ids.shape, -1)

    def _last_logits(self, rows: BlockRows) -> torch.Tensor:
        """Return the logits [N, V] after each row's last real token."""
        return self._forward(rows, rows.last)

    def _forward(self, rows: BlockRows, wanted: torch.Tensor) -> torch.Tensor:
        pool = self._pool
        attention = BlockAttention(pool.memory, rows, pool.page_tokens, self._scratch_page, self._kernel)
        # Padding after a sequence of full length would have positions beyond the model's last.
        positions = rows.positions.clamp_max(self._model.description.max_length - 1)
        return self._model.decoder.logits(rows.token_ids.reshape(1, -1), positions.reshape(1, -1), wanted, attention)


class _Pass:
    """The recorded pass of one shape."""

    def __init__(
        self,
        shape: BlockShape,
        device: torch.device,
        scratch_page: int,
        logits: Callable[[BlockRows], torch.Tensor],
    ) -> None:
        self._buffer = BlockBuffer(shape, scratch_page, device)
        self._replay: Work = recorded(lambda: logits(self._buffer.rows), device)

    def run(self, rows: Sequence[HostRow]) -> torch.Tensor:
        """Return the logits, in memory that the next run overwrites."""
        self._buffer.fill(rows)
        return self._replay()


class _Draft:
    """All recorded steps of a draft of one shape: each step's choice is the token of the next step."""

    def __init__(
        self,
        shape: BlockShape,
        device: torch.device,
        scratch_page: int,
        last_logits: Callable[[BlockRows], torch.Tensor],
        draft_count: int,
        is_sampled: bool,
    ) -> None:
        self._buffer = BlockBuffer(shape, scratch_page, device)
        self._last_logits = last_logits
        self._draft_count = draft_count
        self._is_sampled = is_sampled
        self._seeds = torch.zeros(shape.row_count, dtype=torch.int64, device=device)
        self._temperatures = torch.zeros(shape.row_count, device=device)
        self._replay: Work = recorded(self._steps, device)

    def run(self, rows: Sequence[HostRow], rules: Sequence[ChoiceRule]) -> torch.Tensor:
        """Return the draft tokens [N, draft_count] in the form of `coded`, in memory that the next run overwrites."""
        self._buffer.fill(rows)
        if self._is_sampled:
            self._seeds[: len(rules)] = torch.tensor([signed64(rule.seed) for rule in rules])
            self._temperatures[: len(rules)] = torch.tensor([rule.sampling.temperature for rule in rules])
        return self._replay()

    def _steps(self) -> torch.Tensor:
        rows = self._buffer.rows
        drafts: list[torch.Tensor] = []
        for _ in range(self._draft_count):
            if drafts:
                # A row without a choice has failed, so any token will do for it.
                rows = rows.then(drafts[-1].clamp_min(0))
            logits = self._last_logits(rows)
            drafts.append(self._choices(logits, rows.bases + rows.counts))
        return torch.stack(drafts, dim=1)

    def _choices(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if not self._is_sampled:
            greedy = logits.max(dim=-1)
            return coded(greedy.values, greedy.indices)
        return choose_rows(logits, self._temperatures, self._seeds, positions)
