"""Passes on a CPU by a native decoder: one pass over rows, or several steps of them without bookkeeping in between."""

import sys
from collections.abc import Sequence

import torch

from paceline.checks import DECODED_TOKENS
from paceline.engine.cache.paged import KvPool
from paceline.engine.model.model import LoadedModel
from paceline.engine.model.native_decoder import NativeDecoder
from paceline.engine.passes import FastPasses, Piece, packed, threads_of
from paceline.engine.row_choice import is_plain
from paceline.types import ChoiceRule


class NativePasses(FastPasses):
    def __init__(self, model: LoadedModel, cache: KvPool) -> None:
        """The model's decoder must be a `NativeDecoder`."""
        super().__init__(model, cache)
        assert isinstance(model.decoder, NativeDecoder)
        self._decoder = model.decoder

    def can_step(self, token_count: int, rule: ChoiceRule) -> bool:
        return token_count <= DECODED_TOKENS and is_plain(rule)

    def most_rows(self, token_count: int) -> int:
        return sys.maxsize

    @torch.inference_mode()
    def steps(self, pieces: Sequence[Piece], rules: Sequence[ChoiceRule], counts: Sequence[int]) -> list[list[int]]:
        # Rows that have what they want leave the later steps, from the end.
        order = sorted(range(len(pieces)), key=lambda index: -counts[index])
        token_ids, spans = packed([pieces[index] for index in order])
        attention = self._cache.attention(spans)
        assert self._decoder.can_read(attention)
        with threads_of(self._model, len(token_ids)):
            ordered = [rules[index] for index in order], [counts[index] for index in order]
            made = dict(zip(order, self._decoder.steps(torch.tensor(token_ids), attention, *ordered), strict=True))
        return [made[index] for index in range(len(pieces))]
