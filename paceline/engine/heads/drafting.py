"""Drafts of the target's own heads: keeps what they know of each sequence, and drafts for many at once.

Features of tokens come from the target's passes. They are taken in, into keys and values of the heads' own layers, when
drafts are asked for or when a page of them waits. What is lost, or was never taken in, costs drafts and never output.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from paceline.engine.heads.loading import LoadedHeads
from paceline.engine.interfaces import Attention, KvCache, Span
from paceline.engine.memory import is_out_of_memory
from paceline.engine.model.model import LoadedModel
from paceline.engine.passes import Piece, threads_of
from paceline.engine.row_choice import is_plain
from paceline.engine.sampling import Choice, Choosing
from paceline.engine.transfer import to_device
from paceline.errors import CacheFull
from paceline.types import ChoiceRule

MOST_WAITING = 16
"""Tokens of a sequence whose features may wait to be taken in while nothing is asked for."""

ChoosingOf = Callable[[str, Tensor, ChoiceRule, Sequence[int]], Choosing]
"""Makes the inputs to the choices after a prefix."""
Choose = Callable[[Sequence[Choosing]], list[list[Choice]]]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class HeadsRow:
    """A sequence whose cached tokens are followed by `next_token_id`, after which tokens are to be drafted."""

    sequence_id: str
    next_token_id: int
    count: int
    """Most tokens to draft."""
    rule: ChoiceRule


@dataclass
class _Waiting:
    """Features of a sequence's tokens from `start` on, which were not taken in."""

    start: int
    features: Tensor
    """[n, F]"""

    @property
    def stop(self) -> int:
        return self.start + len(self.features)

    def cut(self, length: int) -> None:
        """Forget what is beyond the first `length` tokens."""
        self.start = min(self.start, length)
        self.features = self.features[: length - self.start]

    def drop(self, stop: int) -> None:
        """Forget what was taken in, up to a token."""
        # A copy: a part of a prompt's features, even an empty one, would keep them all.
        self.start, self.features = stop, self.features[stop - self.start :].clone()


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of a sequence to take in, and the tokens that follow each."""

    sequence_id: str
    start: int
    features: Tensor
    next_ids: Sequence[int]


class HeadsDrafts:
    def __init__(
        self, heads: LoadedHeads, model: LoadedModel, cache: KvCache, choosing: ChoosingOf, choose: Choose
    ) -> None:
        """The cache has `heads.layer_count` layers behind the model's."""
        self._heads, self._layers, self._target = heads.heads, heads.layers, heads.target
        self._head, self._steps = heads.head, heads.steps
        self._model = model
        self._cache = cache
        self._choosing, self._choose = choosing, choose
        self._waiting: dict[str, _Waiting] = {}

    @property
    def kind(self) -> str:
        return self._heads.kind

    @property
    def draft_count(self) -> int:
        return self._heads.draft_count

    @property
    def of_all(self) -> bool:
        """Whether features of all tokens are wanted, and not only of those with logits."""
        return self._layers is not None

    @property
    def tapped_layers(self) -> Sequence[int]:
        return self._heads.tapped_layers

    def take(self, pieces: Sequence[Piece], features: Tensor) -> None:
        """Take the features [T, F] that a pass made of its pieces' tokens."""
        counts = [len(one.token_ids) if self.of_all else one.logit_count for one in pieces]
        for piece, part in zip(pieces, torch.split(features, counts), strict=True):
            base_length = piece.length - len(part)
            known = self._waiting.get(piece.sequence_id)
            if self.of_all and known and known.start <= base_length <= known.stop:
                known.cut(base_length)
                known.features = torch.cat((known.features, part))
            elif len(part):
                self._waiting[piece.sequence_id] = _Waiting(base_length, part.clone())

    def forget(self, sequence_id: str) -> None:
        self._waiting.pop(sequence_id, None)

    @torch.inference_mode()
    def end(self, sequence_ids: Sequence[str]) -> None:
        """Take in what waits of sequences that are about to be freed: others may take their pages over."""
        ending = self._waiting.keys() & sequence_ids
        if self._layers is not None and ending:
            self._in_memory(lambda: self._taken_in({}, {}, ending))
        for one in ending:
            self.forget(one)

    @torch.inference_mode()
    def propose(self, rows: Sequence[HeadsRow]) -> list[tuple[int, ...]]:
        """Return drafts for each row: none for a sequence of which too little is known, or without memory.

        To be called after each pass, once the cache holds the committed tokens alone.
        """
        known = {row.sequence_id: row for row in rows if self._knows(row)}
        made = self._in_memory(lambda: self._made(known)) or {}
        return [made.get(row.sequence_id, ()) for row in rows]

    def _in_memory(self, work: Callable[[], Made]) -> Made | None:
        """Return what the work makes; None, with all that waits forgotten, when memory runs out."""
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._waiting.clear()
            return None

    def _knows(self, row: HeadsRow) -> bool:
        """Return whether the features of the last cached token are there."""
        length, waiting = self._cache.length(row.sequence_id), self._waiting.get(row.sequence_id)
        if waiting is None:
            return False
        waiting.cut(length)
        is_last = waiting.stop == length and len(waiting.features) > 0
        return is_last and self._count(row, length) > 0

    def _count(self, row: HeadsRow, length: int) -> int:
        return min(row.count, self.draft_count, self._model.description.max_length - length - 1)

    def _made(self, rows: Mapping[str, HeadsRow]) -> dict[str, tuple[int, ...]]:
        lengths = {one: self._cache.length(one) for one in rows}
        counts = {one: self._count(row, lengths[one]) for one, row in rows.items()}
        if self._layers is None:
            return self._drafted(rows, counts, self._last(rows)) if rows else {}
        try:
            if self._heads.repeats_layers:
                counts = {one: self._with_room(one, count) for one, count in counts.items()}
            at_once = self._at_once(rows, counts, lengths)
            apart = {one: row for one, row in rows.items() if one not in at_once}
            states = self._taken_in(apart, lengths)
            return at_once | (self._drafted(apart, counts, states) if apart else {})
        finally:
            for one, length in lengths.items():
                self._cache.truncate(one, length)

    def _at_once(
        self, rows: Mapping[str, HeadsRow], counts: Mapping[str, int], lengths: Mapping[str, int]
    ) -> dict[str, tuple[int, ...]]:
        """Take in what waits, and draft by one call; leave out rows for which that cannot be done."""
        able = [one for one, row in rows.items() if is_plain(row.rule)]
        if not self._steps or not able:
            return {}
        able.sort(key=lambda one: -counts[one])
        parts = [self._part(one, lengths[one], (rows[one].next_token_id,)) for one in able]
        parts += self._lagging(lengths)  # in the same call, because rows may share their pages
        with self._threads(sum(len(part.next_ids) for part in parts)):
            ids, features, spans = self._entering(parts)
            attention = self._cache.attention(spans)
            if not self._steps.can_read(attention):
                return {}
            rules, wanted = [rows[one].rule for one in able], [counts[one] for one in able]
            made = self._steps.drafts(ids, features, attention, rules, wanted)
            self._drop(parts)
        return {one: tuple(drafts) for one, drafts in zip(able, made, strict=True)}

    def _last(self, rows: Mapping[str, HeadsRow]) -> Tensor:
        """Return the states after each row's next token, of heads without layers."""
        with self._threads(len(rows)):
            features = torch.stack([self._waiting[one].features[-1] for one in rows])
            embedded = self._embedded([row.next_token_id for row in rows.values()])
            return self._heads.leave(self._heads.enter(features, embedded), embedded)

    def _with_room(self, sequence_id: str, count: int) -> int:
        """Make room for the drafts that go through the layers; return how many drafts there can be."""
        try:
            self._cache.append(sequence_id, (0,) * (count - 1))
        except CacheFull:
            return 1
        return count

    def _taken_in(
        self, rows: Mapping[str, HeadsRow], lengths: Mapping[str, int], ending: Container[str] = ()
    ) -> Tensor:
        """Take in what waits; return the states after each row's next token. `lengths` has those that draft.

        Of sequences that are `ending` all is taken in.
        """
        parts = [self._part(one, lengths[one], (row.next_token_id,)) for one, row in rows.items()]
        parts += self._lagging(lengths, ending)
        if not parts:
            return torch.empty(0)
        with self._threads(sum(len(part.next_ids) for part in parts)):
            ids, features, spans = self._entering(parts)
            attention = self._cache.attention(spans)
            if not rows and self._steps and self._steps.can_read(attention):
                self._steps.take_in(ids, features, attention)
                states = torch.empty(0)
            else:
                embedded = self._embedded(ids)
                positions = [part.start + place for part in parts for place in range(len(part.next_ids))]
                last = [span.stop - 1 for span in spans]
                states = self._through(self._heads.enter(features, embedded), positions, attention, embedded, last)
            self._drop(parts)
        return states[: len(rows)]

    def _lagging(self, drafting: Container[str], ending: Container[str] = ()) -> list[_Part]:
        """Return what is to be taken in of sequences that draft nothing."""
        parts = list[_Part]()
        for one, waiting in [*self._waiting.items()]:
            length = self._cache.length(one)
            if one in drafting or not length:
                continue
            waiting.cut(length)
            if waiting.stop < length - 1:
                # Of a pass that ran out of memory: what follows was taken over from another sequence meanwhile.
                self.forget(one)
            # What follows the last token is not known yet.
            elif len(waiting.features) > (1 if one in ending else MOST_WAITING):
                parts.append(self._part(one, length))
        return parts

    def _entering(self, parts: Sequence[_Part]) -> tuple[list[int], Tensor, list[Span]]:
        """Return the tokens of parts, the features [T, F] of those before them, and the spans."""
        ids = [token_id for part in parts for token_id in part.next_ids]
        spans = self._spans([(part.sequence_id, part.start, len(part.next_ids)) for part in parts])
        return ids, torch.cat([part.features for part in parts]), spans

    def _drop(self, parts: Sequence[_Part]) -> None:
        """Forget the features of what was taken in."""
        for part in parts:
            self._waiting[part.sequence_id].drop(part.start + len(part.next_ids))

    def _part(self, sequence_id: str, length: int, next_ids: tuple[int, ...] = ()) -> _Part:
        waiting = self._waiting[sequence_id]
        ids = (*self._cache.token_ids(sequence_id)[waiting.start + 1 : length], *next_ids)
        return _Part(sequence_id, waiting.start, waiting.features[: len(ids)], ids)

    def _drafted(
        self, rows: Mapping[str, HeadsRow], counts: Mapping[str, int], states: Tensor
    ) -> dict[str, tuple[int, ...]]:
        """Draft from the rows' states, one place after another."""
        prefixes = {one: self._prefix(row) for one, row in rows.items()}
        lengths = {one: len(prefix) for one, prefix in prefixes.items()}
        live, most = list(rows), max(counts.values())
        ahead = None if self._heads.looks_back else self._logits_ahead(states, most)
        for place in range(most):
            logits = self._logits(states, place) if ahead is None else ahead[place]
            choices = self._choose(
                [
                    self._choosing(one, logits[index : index + 1], rows[one].rule, prefixes[one])
                    for index, one in enumerate(live)
                ]
            )
            kept = []
            for index, (one, (choice,)) in enumerate(zip(live, choices, strict=True)):
                if isinstance(choice, int):
                    prefixes[one].append(choice)
                    if place + 1 < counts[one]:
                        kept.append(index)
            live = [live[index] for index in kept]
            if not live:
                break
            if ahead is None:
                states = self._followed(live, states[kept], [prefixes[one] for one in live])
            else:
                ahead = ahead[:, kept]
        return {one: tuple(prefix[lengths[one] :]) for one, prefix in prefixes.items()}

    def _logits(self, states: Tensor, place: int) -> Tensor:
        """Return the logits [N, V] of drafts at a place."""
        with self._threads(len(states)):
            return self._head(self._heads.output(states, place))

    def _logits_ahead(self, states: Tensor, count: int) -> Tensor:
        """Return the logits [count, N, V] of drafts at all places by one product, where none depends on another."""
        with self._threads(count * len(states)):
            outputs = torch.stack([self._heads.output(states, place) for place in range(count)])
            return self._head(outputs.flatten(0, 1)).view(count, len(states), -1)

    def _followed(self, live: Sequence[str], states: Tensor, prefixes: Sequence[Sequence[int]]) -> Tensor:
        """Return the states of sequences after the last token of each prefix."""
        with self._threads(len(live)):
            embedded = self._embedded([prefix[-1] for prefix in prefixes])
            states = self._heads.follow(states, embedded)
            if not self._heads.repeats_layers:
                return states
            # The token before the last is the one whose place this is.
            positions = [len(prefix) - 2 for prefix in prefixes]
            spans = self._spans([(one, position, 1) for one, position in zip(live, positions, strict=True)])
            return self._through(states, positions, self._cache.attention(spans), embedded, range(len(live)))

    def _through(
        self, hidden: Tensor, positions: Sequence[int], attention: Attention, embedded: Tensor, wanted: Sequence[int]
    ) -> Tensor:
        """Run tokens through the layers; return the states after those at the indices `wanted`."""
        assert self._layers
        device = hidden.device
        indices = to_device(wanted, device)
        made = self._layers(hidden, to_device(positions, device), attention, indices)
        return self._heads.leave(made, embedded[indices])

    def _spans(self, parts: Sequence[tuple[str, int, int]]) -> list[Span]:
        """Return the spans of parts: sequence, first position, count."""
        spans, start = list[Span](), 0
        for sequence_id, first, count in parts:
            spans.append(Span(sequence_id, start, start + count, first + count))
            start += count
        return spans

    def _prefix(self, row: HeadsRow) -> list[int]:
        length = self._waiting[row.sequence_id].stop
        return [*self._cache.token_ids(row.sequence_id)[:length], row.next_token_id]

    def _embedded(self, token_ids: Sequence[int]) -> Tensor:
        device = self._model.kv_shape.device
        return self._target.embedded(to_device([token_ids], device))

    def _threads(self, token_count: int) -> AbstractContextManager[object]:
        return threads_of(self._model, token_count)
