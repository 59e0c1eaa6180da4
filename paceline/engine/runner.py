"""One packed pass over the rows of a group, and the cache behind it.

Owns the order of things: take over what is shared, cut long prompts, make room, run the model, undo on failure. Knows
nothing of drafting or verifying. All calls come from one thread.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from paceline.checks import RowLimits, check_sequence_id
from paceline.engine.blocks import BlockPasses
from paceline.engine.blocks.choice import is_plain
from paceline.engine.blocks.passes import MAX_NEW_TOKENS
from paceline.engine.dense_cache import DenseCache
from paceline.engine.kv_cache import KvCache
from paceline.engine.kv_pool import KvPool
from paceline.engine.memory import kv_memory_bytes
from paceline.engine.model import LoadedModel
from paceline.engine.numerics import resolved_numerics
from paceline.engine.options import EngineOptions
from paceline.engine.passes import FastPasses, Piece, StrictPasses
from paceline.errors import InvalidRequest, Overloaded, PacelineError
from paceline.types import ModelDescription, Prefilled, ProposeRow, SequenceLength


@dataclass(frozen=True, slots=True)
class PackedRow:
    """New tokens of one sequence, to follow its first `base_length` cached ones."""

    sequence_id: str
    base_length: int
    token_ids: tuple[int, ...]
    draft_count: int = 0
    """Trailing tokens that are drafts; logits are wanted for them and for the token before them."""

    @property
    def logit_count(self) -> int:
        return self.draft_count + 1


@dataclass(frozen=True, slots=True)
class PassSize:
    """What one pass computed."""

    row_count: int
    token_count: int
    prompt_token_count: int
    """Those of rows that bring a prompt; the others are decoding."""


Made = TypeVar("Made")

Outcome = torch.Tensor | Prefilled | PacelineError
"""Logits [draft_count + 1, V], or how far a long row got, or why a row could not run."""


class Runner:
    """A loaded model with its cache."""

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions,
        clock: Callable[[], float] = time.monotonic,
        on_pass: Callable[[PassSize], None] = lambda size: None,
    ) -> None:
        """`on_pass` is told of every pass, in the thread that ran it. Raises StartupError."""
        options = replace(options, numerics=resolved_numerics(model, options))
        self.model = model
        self.cache = make_cache(model, options)
        self._options = options
        self._passes = make_passes(model, self.cache, options)
        self._clock = clock
        self._on_pass = on_pass
        self._last_named: dict[str, float] = {}

    @property
    def limits(self) -> RowLimits:
        """What no row may exceed, however empty the cache is."""
        model = self.model.description
        return RowLimits(model.vocabulary_size, model.max_length, self.cache.max_length)

    def describe(self) -> ModelDescription:
        cache = replace(self.cache.describe(), prefill_chunk_tokens=self._options.prefill_chunk_tokens)
        return replace(self.model.description, numerics=self._options.numerics, cache=cache)

    def forward(self, rows: Sequence[PackedRow]) -> list[Outcome]:
        """Run the rows; each row's outcome tells its logits, that it was taken in part, or why it could not run.

        Long prompts share the chunk and go on with the next call; a prompt that begins like one under way waits for
        it. Every row's cache then holds what was run. When the run itself fails, every cache is cut to `base_length`.
        """
        self._name(rows)
        placing = _Placing(self.cache, self._options)
        pieces = {index: placing.place(row) for index, row in enumerate(rows)}
        running = {index: piece for index, piece in pieces.items() if isinstance(piece, Piece) and piece.token_ids}
        logits = dict(zip(running, self._run(list(running.values())), strict=True))
        if running:
            self._on_pass(_pass_size([(rows[index], piece) for index, piece in running.items()]))
        outcomes: list[Outcome] = []
        for index, (row, piece) in enumerate(zip(rows, pieces.values(), strict=True)):
            if isinstance(piece, PacelineError):
                outcomes.append(piece)
            elif isinstance(outcome := logits.get(index), PacelineError):
                self.cache.truncate(row.sequence_id, row.base_length)
                outcomes.append(outcome)
            elif piece.logit_count:
                assert outcome is not None
                self.cache.seal(row.sequence_id, piece.length - row.draft_count)
                outcomes.append(outcome)
            else:
                self.cache.seal(row.sequence_id, piece.length)
                outcomes.append(Prefilled(piece.length))
        return outcomes

    def _name(self, rows: Iterable[PackedRow | ProposeRow]) -> None:
        """Note that a call named these sequences: their owner lives."""
        now = self._clock()
        self._last_named |= {row.sequence_id: now for row in rows}

    def _run(self, pieces: list[Piece]) -> Sequence[torch.Tensor | PacelineError]:
        return self._guarded(pieces, lambda: self._passes.run(pieces))

    def _guarded(self, pieces: Sequence[Piece], work: Callable[[], Sequence[Made]]) -> Sequence[Made | PacelineError]:
        """Return what the work makes of each piece, or a refusal when memory ran out; undo the pieces when it fails."""
        if not pieces:
            return []
        try:
            return work()
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                self._undo(pieces)
                raise
            refusal = Overloaded(f"no memory is left for a pass of {sum(len(one.token_ids) for one in pieces)} tokens")
            return [refusal] * len(pieces)
        except BaseException:
            self._undo(pieces)
            raise

    def drafts_at_once(self, row: ProposeRow) -> bool:
        """Whether all drafts of the row can be had by one call of `draft`."""
        is_short = len(row.token_ids) <= MAX_NEW_TOKENS
        return isinstance(self._passes, BlockPasses) and is_short and is_plain(row.rule.sampling)

    def draft(self, rows: Sequence[ProposeRow], draft_count: int) -> list[list[int] | PacelineError]:
        """Return the choices that follow each row, each made from the ones before, or why there are none.

        At most `MAX_ROWS` rows, all as `drafts_at_once` wants them. All choices but the last are cached then.
        """
        passes = self._passes
        assert isinstance(passes, BlockPasses)
        self._name(rows)
        outcomes: dict[int, list[int] | PacelineError] = {}
        pieces: dict[int, Piece] = {}
        for index, row in enumerate(rows):
            try:
                self.cache.keep(row.sequence_id, row.base_length, ())
                # Room for the drafts too, though their tokens are known only afterwards.
                self.cache.append(row.sequence_id, row.token_ids + (0,) * (draft_count - 1))
                pieces[index] = Piece(row.sequence_id, row.base_length, row.token_ids, 1)
            except PacelineError as error:
                outcomes[index] = error
        placed, rules = list(pieces.values()), [rows[index].rule for index in pieces]
        drafts = self._guarded(placed, lambda: passes.draft(placed, rules, draft_count))
        for step in range(draft_count if placed else 0):
            token_count = len(placed) if step else sum(len(piece.token_ids) for piece in placed)
            self._on_pass(PassSize(len(placed), token_count, 0))
        for (index, piece), found in zip(pieces.items(), drafts, strict=True):
            if isinstance(found, PacelineError):
                self._undo([piece])
            else:
                self.cache.seal(piece.sequence_id, piece.length)
            outcomes[index] = found
        return [outcomes[index] for index in range(len(rows))]

    def _undo(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self.cache.truncate(piece.sequence_id, piece.base_length)

    def rollback(self, lengths: Iterable[SequenceLength], scope: str = "") -> list[int | PacelineError]:
        """Truncate each named sequence of the caller's scope; return its cached length, or why it was left alone."""
        return [self._rollback_one(one, scope) for one in lengths]

    def _rollback_one(self, one: SequenceLength, scope: str) -> int | PacelineError:
        if one.length < 0:
            return InvalidRequest(f"length is {one.length}; it cannot be negative", field="length")
        try:
            check_sequence_id(one.sequence_id)
            self.cache.truncate(scope + one.sequence_id, one.length)
        except PacelineError as error:
            return error
        self._last_named[scope + one.sequence_id] = self._clock()
        return one.length

    def release(self, sequence_ids: Iterable[str], scope: str = "") -> int:
        """Free the named sequences of the caller's scope; return how many were held."""
        count = 0
        for sequence_id in sequence_ids:
            self._last_named.pop(scope + sequence_id, None)
            count += self.cache.release(scope + sequence_id)
        return count

    def drop_idle(self) -> int:
        """Free the sequences whose owner is gone: no call named them for the time to live. Return how many."""
        oldest = self._clock() - self._options.sequence_ttl_s
        return self.release([one for one, named in self._last_named.items() if named < oldest])


class _Placing:
    """Finds room in the cache for the rows of one call, within its share of prompt tokens."""

    def __init__(self, cache: KvCache, options: EngineOptions) -> None:
        self._cache = cache
        self._budget = options.prefill_chunk_tokens
        self._page_tokens = options.page_tokens
        self._under_way: set[bytes] = set()

    def place(self, row: PackedRow) -> Piece | PacelineError:
        """Make room for what of the row goes into this pass, perhaps nothing; or tell why it cannot."""
        try:
            # What logits are wanted for must be computed, so it cannot be taken over.
            shareable = row.token_ids[: len(row.token_ids) - row.logit_count]
            base_length = self._cache.keep(row.sequence_id, row.base_length, shareable)
            rest = row.token_ids[base_length - row.base_length :]
            count = self._count(row, base_length, rest)
            if count:
                self._cache.append(row.sequence_id, rest[:count])
        except PacelineError as error:
            return error
        whole = count == len(rest)
        return Piece(row.sequence_id, base_length, rest[:count], row.logit_count if whole else 0)

    def _count(self, row: PackedRow, base_length: int, rest: tuple[int, ...]) -> int:
        """How many of the row's remaining tokens to run now: a decoding row's all, a prompt's what the chunk allows."""
        new_count = len(rest) - row.draft_count
        if new_count <= DECODED_TOKENS:
            return len(rest)
        key = self._cache.next_key(row.sequence_id, rest[:new_count])
        if key is not None:
            if key in self._under_way:
                return 0
            self._under_way.add(key)
        if new_count <= self._budget:
            self._budget -= new_count
            return len(rest)
        count = min(self._budget, new_count - 1)
        self._budget -= count
        # Ends with a page where it can, for only then may the next page be found in the cache.
        beyond_page = (base_length + count) % self._page_tokens
        return count - beyond_page if beyond_page < count else count


def _pass_size(running: Sequence[tuple[PackedRow, Piece]]) -> PassSize:
    counts = [len(piece.token_ids) for _, piece in running]
    prompts = [len(row.token_ids) - row.draft_count > DECODED_TOKENS for row, _ in running]
    return PassSize(
        len(counts), sum(counts), sum(count for count, prompt in zip(counts, prompts, strict=True) if prompt)
    )


DECODED_TOKENS = 16
"""Rows that bring no more committed tokens than this always run whole: they are decoding, or nearly."""


def make_passes(model: LoadedModel, cache: KvCache, options: EngineOptions) -> FastPasses:
    if options.numerics == "strict":
        return StrictPasses(model, cache)
    if has_fixed_shapes(model, options):
        assert isinstance(cache, KvPool)
        return BlockPasses(model, cache)
    return FastPasses(model, cache)


def has_fixed_shapes(model: LoadedModel, options: EngineOptions) -> bool:
    if options.numerics == "strict" or options.layout == "dense":
        return False
    return model.kv_shape.device.type == "cuda" if options.fixed_shapes is None else options.fixed_shapes


def make_cache(model: LoadedModel, options: EngineOptions) -> KvCache:
    """Lay out the cache that the options ask for. Raises StartupError when it could not hold one full sequence."""
    capacity_bytes = kv_memory_bytes(options.kv_memory, model.kv_shape.device)
    if options.layout == "paged":
        return KvPool(
            model.kv_shape,
            capacity_bytes,
            page_tokens=options.page_tokens,
            prefix_sharing=options.prefix_sharing,
            strict=options.numerics == "strict",
            has_scratch=has_fixed_shapes(model, options),
        )
    return DenseCache(model.kv_shape, capacity_bytes)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)
