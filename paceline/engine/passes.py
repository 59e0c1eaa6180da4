"""Passes: pieces of sequences become model calls (one, or several of one fixed shape), which give logits."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from paceline.engine.interfaces import KvCache, Span
from paceline.engine.model.model import LoadedModel
from paceline.engine.threads import kernels_alone, pass_threads

STRICT_ROWS = 64
"""Tokens in every model call of strict numerics, padding included."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence to be computed; the cache has room for them after the first `base_length`."""

    sequence_id: str
    base_length: int
    token_ids: tuple[int, ...]
    logit_count: int
    """Number of trailing tokens whose logits are wanted."""

    @property
    def length(self) -> int:
        return self.base_length + len(self.token_ids)

    def split(self, count: int) -> tuple["Piece", "Piece"]:
        """Cut after `count` tokens."""
        left_logits = max(0, self.logit_count - (len(self.token_ids) - count))
        left = Piece(self.sequence_id, self.base_length, self.token_ids[:count], left_logits)
        right_logits = self.logit_count - left_logits
        return left, Piece(self.sequence_id, left.length, self.token_ids[count:], right_logits)


class FastPasses:
    """All pieces in one call, without padding."""

    def __init__(self, model: LoadedModel, cache: KvCache) -> None:
        self._model = model
        self._cache = cache

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        """Return each piece's logits [logit_count, V]."""
        return torch.split(self._logits(pieces), [piece.logit_count for piece in pieces])

    def _logits(self, pieces: Sequence[Piece], token_count: int = 0, logit_count: int = 0) -> torch.Tensor:
        """Run one call, padded to `token_count` tokens and `logit_count` logits; return the wanted logits [W, V]."""
        token_ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        spans: list[Span] = []
        for piece in pieces:
            start = len(token_ids)
            token_ids += piece.token_ids
            positions += range(piece.base_length, piece.length)
            wanted += range(len(token_ids) - piece.logit_count, len(token_ids))
            spans.append(Span(piece.sequence_id, start, len(token_ids), piece.length))
        device = self._model.kv_shape.device
        padding = [0] * (token_count - len(token_ids))
        with self._threads(len(token_ids) + len(padding)):
            logits = self._model.decoder.logits(
                torch.tensor([token_ids + padding], device=device),
                torch.tensor([positions + padding], device=device),
                torch.tensor(wanted + [0] * (logit_count - len(wanted)), dtype=torch.long, device=device),
                self._cache.attention(spans),
            )
        return logits[: len(wanted)]

    def _threads(self, token_count: int) -> AbstractContextManager[object]:
        if self._model.decoder.shares_work:
            return kernels_alone()
        return pass_threads(self._model.layer_parameter_count, token_count)


class StrictPasses(FastPasses):
    """Calls of `STRICT_ROWS` tokens and logits each, so that no result depends on how much else is computed."""

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        parts = [self._logits(batch, STRICT_ROWS, STRICT_ROWS) for batch in _batches(pieces, STRICT_ROWS)]
        return torch.split(torch.cat(parts), [piece.logit_count for piece in pieces])


def _batches(pieces: Sequence[Piece], token_count: int) -> Iterator[list[Piece]]:
    """Yield the pieces in order, cut into batches of at most `token_count` tokens."""
    batch: list[Piece] = []
    room = token_count
    for piece in pieces:
        rest = piece
        while len(rest.token_ids) > room:
            left, rest = rest.split(room)
            yield [*batch, left] if left.token_ids else batch
            batch, room = [], token_count
        batch.append(rest)
        room -= len(rest.token_ids)
    yield batch
