"""Passes: pieces of sequences become model calls (one, or several of one fixed shape), which give logits."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from paceline.engine.interfaces import Attention, KvCache, Span
from paceline.engine.model.decoder import FeatureDecoder
from paceline.engine.model.model import LoadedModel
from paceline.engine.model.taps import Taps
from paceline.engine.row_choice import RankedToken
from paceline.engine.threads import kernels_alone, pass_threads
from paceline.engine.transfer import to_device
from paceline.types import ChoiceRule

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


def packed(pieces: Sequence[Piece]) -> tuple[list[int], list[Span]]:
    """Return the tokens of the pieces in one row, and the span of each in it."""
    token_ids: list[int] = []
    spans: list[Span] = []
    for piece in pieces:
        start = len(token_ids)
        token_ids += piece.token_ids
        spans.append(Span(piece.sequence_id, start, len(token_ids), piece.length))
    return token_ids, spans


class Features(Protocol):
    """Takes features of tokens, which passes compute anyway: what goes into the model's last norm."""

    @property
    def of_all(self) -> bool:
        """Whether features of all tokens are wanted, and not only of those with logits."""
        ...

    @property
    def tapped_layers(self) -> Sequence[int]:
        """Layers of the model of which what goes in is wanted beside the features; only for all tokens."""
        ...

    def take(self, pieces: Sequence[Piece], features: torch.Tensor) -> None:
        """Take the features [T, H] of the pieces' tokens, or [T, (1 + layers) * H] with tapped layers."""
        ...


@runtime_checkable
class StepPasses(Protocol):
    """Passes that can make several steps of a row, each choice the one token of the next step."""

    def can_step(self, token_count: int, rule: ChoiceRule) -> bool:
        """Return whether a row of so many tokens can take part in `steps`, and be chosen for by this rule."""
        ...

    def most_rows(self, token_count: int) -> int:
        """Return how many rows of so many tokens can take steps together."""
        ...

    def steps(self, pieces: Sequence[Piece], rules: Sequence[ChoiceRule], counts: Sequence[int]) -> list[list[int]]:
        """Return `counts` choices after each piece, each choice made after the ones before; fewer if one fails.

        The cache must have room for all of a piece's choices but the last, and holds their keys and values afterwards.
        """
        ...


@runtime_checkable
class RankedStepPasses(StepPasses, Protocol):
    """Passes whose steps can also say what else might have been chosen."""

    def ranked_steps(
        self, pieces: Sequence[Piece], rules: Sequence[ChoiceRule], counts: Sequence[int], ranked_count: int
    ) -> list[list[list[RankedToken]]]:
        """Make steps as `steps` does; return the `ranked_count` likeliest tokens at each place, the choice first."""
        ...


class FastPasses:
    """All pieces in one call, without padding."""

    def __init__(self, model: LoadedModel, cache: KvCache, features: Features | None = None) -> None:
        """The decoder must be a `FeatureDecoder` if something takes `features`."""
        self._model = model
        self._cache = cache
        self._features = features

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        """Return each piece's logits [logit_count, V]."""
        return torch.split(self._logits(pieces), [piece.logit_count for piece in pieces])

    def _logits(self, pieces: Sequence[Piece], token_count: int = 0, logit_count: int = 0) -> torch.Tensor:
        """Run one call, padded to `token_count` tokens and `logit_count` logits; return the wanted logits [W, V]."""
        token_ids, spans = packed(pieces)
        positions: list[int] = []
        wanted: list[int] = []
        for piece, span in zip(pieces, spans, strict=True):
            positions += range(piece.base_length, piece.length)
            wanted += range(span.stop - piece.logit_count, span.stop)
        device = self._model.kv_shape.device
        padding = [0] * (token_count - len(token_ids))
        with threads_of(self._model, len(token_ids) + len(padding)):
            logits, features = self._made(
                to_device([token_ids + padding], device),
                to_device([positions + padding], device),
                to_device(wanted + [0] * (logit_count - len(wanted)), device, torch.long),
                self._cache.attention(spans),
            )
            if self._features and features is not None:
                self._features.take(pieces, features[: len(token_ids) if self._features.of_all else len(wanted)])
        return logits[: len(wanted)]

    def _made(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the decoder; return logits [W, V], and the features that something takes."""
        decoder = self._model.decoder
        if self._features is None:
            return decoder.logits(token_ids, positions, wanted, attention), None
        assert isinstance(decoder, FeatureDecoder)
        taps = Taps(self._features.tapped_layers) if self._features.of_all else None
        return decoder.logits_and_features(token_ids, positions, wanted, attention, taps)


def threads_of(model: LoadedModel, token_count: int) -> AbstractContextManager[object]:
    """Use as many threads for torch's operations inside as a pass of so many tokens is worth."""
    return kernels_alone() if model.decoder.shares_work else pass_threads(model.layer_parameter_count, token_count)


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
