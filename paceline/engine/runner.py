"""One packed pass over rows, and the cache behind it.

It owns the order of work: place the rows in the cache, run the model, undo on failure. It knows nothing of verifying.
One thread at a time calls it.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from paceline.checks import DECODED_TOKENS, RowLimits, check_sequence_id
from paceline.engine.attention.strict import StrictAttention
from paceline.engine.budget import Budget, budget_of, cached_shape
from paceline.engine.cache.dense import DenseCache
from paceline.engine.cache.paged import KvPool
from paceline.engine.cache.prefixes import Prefixes, Relying
from paceline.engine.calls import Call, RuledCalls
from paceline.engine.compute import compute_of
from paceline.engine.fixed_shapes import BlockPasses
from paceline.engine.heads.drafting import HeadsDrafts, HeadsRow
from paceline.engine.heads.loading import LoadedHeads
from paceline.engine.interfaces import KvCache, KvShape, let_go
from paceline.engine.masks import Masks
from paceline.engine.memory import is_out_of_memory, refusing_to_start
from paceline.engine.model.identity import kernels_of, model_digest
from paceline.engine.model.model import LoadedModel
from paceline.engine.model.native_decoder import NativeDecoder
from paceline.engine.native_passes import NativePasses
from paceline.engine.numerics import resolved_numerics
from paceline.engine.options import EngineOptions
from paceline.engine.owners import Owners
from paceline.engine.passes import FastPasses, Features, Piece, StrictPasses
from paceline.engine.placing import PackedRow, Placing
from paceline.engine.room import CacheRoom
from paceline.engine.row_choice import RankedToken
from paceline.engine.rules import SequenceRules
from paceline.engine.sampling import Choice, Choosing, choose, ranked
from paceline.errors import InvalidRequest, Overloaded, PacelineError, StartupError, as_result
from paceline.scope import RowT
from paceline.types import GREEDY, ChoiceRule, ModelDescription, ModelIdentity, Prefilled, RolledBack, SequenceLength


@dataclass(frozen=True, slots=True)
class PassSize:
    """Numbers of rows and tokens that one pass computed."""

    row_count: int
    token_count: int
    prompt_token_count: int
    """Tokens of rows that bring a prompt; the other tokens are decoding."""


Made = TypeVar("Made")


@dataclass(frozen=True)
class ScoredPart:
    """How far a long row got of which all logits are wanted."""

    length: int
    """Cached tokens of the sequence."""
    logits: torch.Tensor
    """[T, V]: after each token that was run."""


Outcome = torch.Tensor | ScoredPart | Prefilled | PacelineError
"""Logits [draft_count + 1, V], of a scored row those after all its tokens; how far a long row got; or why a row could
not run."""


class Runner:
    """A loaded model with its cache."""

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions,
        clock: Callable[[], float] = time.monotonic,
        on_pass: Callable[[PassSize], None] = lambda size: None,
        heads: LoadedHeads | None = None,
    ) -> None:
        """`on_pass` is called after every pass, in the thread that ran it. Raise StartupError."""
        assert not (model.group and (heads or options.layout == "dense"))  # the settings refuse it
        options = replace(options, numerics=resolved_numerics(model, options))
        self.model = model
        budget = budget_of(model, options, heads)
        self.cache = make_cache(model, options, budget, heads)
        self._prefixes = Prefixes(self.cache)
        self._masks = Masks(model.tokenizer)
        self.owners = Owners(self.cache, clock)
        """Callers and ages of the sequences in the cache; freed with them."""
        self.room = CacheRoom(self.cache, self.owners, self._given_up)
        self._rules = SequenceRules(model.description.vocabulary_size, self._check_cached, self._masks.check)
        """Rules of the sequences in the cache; freed with them."""
        self._options = options
        self._setting, self.most_logits = budget.setting, budget.logit_count
        """Of how many places a pass may hold logits at a time."""
        self._heads = HeadsDrafts(heads, model, self.cache, self.choosing, self.choose) if heads else None
        self.passes = make_passes(model, self.cache, options, self._heads)
        self._clock = clock
        self.on_pass = on_pass
        self.on_changed: Callable[[str], None] = lambda sequence_id: None
        """Called with the cache's id of a sequence that is cut or freed between its rows."""
        self._description = _identified(model, options, self._heads)

    @property
    def limits(self) -> RowLimits:
        """Limits that hold for a row even when the cache is empty."""
        model = self.model.description
        return RowLimits(model.vocabulary_size, model.max_length, self.cache.max_length)

    def describe(self) -> ModelDescription:
        cache = replace(self.cache.describe(), prefill_chunk_tokens=self._options.prefill_chunk_tokens)
        return replace(self._description, cache=cache)

    def ruled(self, calls: Sequence[Call[RowT]], check: Callable[[RowT], None]) -> RuledCalls[RowT]:
        """Begin calls: see `SequenceRules.ruled`. The rows also show that their sequences' owners still live."""

        def rule(call: Call[RowT]) -> tuple[Sequence[RowT], dict[int, PacelineError]]:
            named, errors = self._rules.ruled(call.rows, call.caller.scope, check)
            able = (row.sequence_id for index, row in enumerate(named) if index not in errors)
            self.owners.named(able, call.caller)
            return named, errors

        return RuledCalls(calls, rule)

    def _given_up(self, sequence_id: str) -> None:
        self.on_changed(sequence_id)
        if self._heads:
            self._heads.forget(sequence_id)

    def _check_cached(self, row: Relying) -> None:
        self.room.check(row.sequence_id, is_relying=row.base_length > 0)
        self._prefixes.check(row)

    def parts(self, logit_counts: Sequence[int]) -> Iterator[slice]:
        """Yield the parts of a call's rows that are run one after the other, so that logits of few are held at a time.

        `logit_counts` are those of the rows.
        """
        start, held = 0, 0
        for stop, count in enumerate(logit_counts):
            if stop > start and held + count > self.most_logits:
                yield slice(start, stop)
                start, held = stop, 0
            held += count
        yield slice(start, len(logit_counts))

    def forward(self, rows: Sequence[PackedRow]) -> list[Outcome]:
        """Run the rows and return their outcomes.

        Prompts share the chunk and go on with later calls: see `placing`. Afterwards the cache holds the tokens that
        were run. When the run itself fails, every row's sequence is cut to `base_length`.
        """
        vocabulary_size = self.model.description.vocabulary_size
        placing = Placing(self.cache, self.owners, self.room, self._options, vocabulary_size, self.most_logits)
        pieces = dict(enumerate(placing.place(rows)))
        running = {index: piece for index, piece in pieces.items() if isinstance(piece, Piece) and piece.token_ids}
        try:
            # Those that wait for a later pass too, because outcomes name what they have cached.
            with self.room.kept([piece.sequence_id for piece in pieces.values() if isinstance(piece, Piece)]):
                logits = dict(zip(running, self._run(list(running.values())), strict=True))
        except BaseException:
            for row, piece in zip(rows, pieces.values(), strict=True):
                if isinstance(piece, Piece):
                    let_go(self.cache, row.sequence_id, row.base_length)
            raise
        if running:
            self.on_pass(_pass_size([(rows[index], piece) for index, piece in running.items()]))
        return [self._outcome(row, pieces[index], logits.get(index)) for index, row in enumerate(rows)]

    def _outcome(
        self, row: PackedRow, piece: Piece | PacelineError, made: torch.Tensor | PacelineError | None
    ) -> Outcome:
        """Seal what a row's pass computed, and return its outcome; `made` is None for a piece without tokens."""
        if isinstance(piece, PacelineError):
            return piece
        if isinstance(made, PacelineError):
            let_go(self.cache, row.sequence_id, row.base_length)
            return made
        if made is not None and piece.length == row.length and not row.following_count:
            self.cache.seal(row.sequence_id, piece.length - row.draft_count)
            return made
        self.cache.seal(row.sequence_id, piece.length)
        return Prefilled(piece.length) if made is None or not row.is_scored else ScoredPart(piece.length, made)

    def _run(self, pieces: list[Piece]) -> Sequence[torch.Tensor | PacelineError]:
        return self.guarded(pieces, lambda: self.passes.run(pieces))

    def guarded(self, pieces: Sequence[Piece], work: Callable[[], Sequence[Made]]) -> Sequence[Made | PacelineError]:
        """Return the result of `work` for each piece, or a refusal for each when memory ran out."""
        if not pieces:
            return []
        try:
            return work()
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            refusal = Overloaded(f"no memory is left for a pass of {sum(len(one.token_ids) for one in pieces)} tokens")
            return [refusal] * len(pieces)

    def choosing(
        self,
        sequence_id: str,
        logits: torch.Tensor,
        rule: ChoiceRule,
        prefix: Sequence[int],
        following: Sequence[int] = (),
    ) -> Choosing:
        """Return the inputs to the choices of a sequence, with the mask of its rule's response format."""
        if rule.response_format is None:
            return Choosing(logits, rule, prefix, following)
        allowed = self._masks.allowed(sequence_id, rule, prefix, following, logits.shape[1])
        return Choosing(logits, rule, prefix, following, allowed.to(logits.device))

    def choose(self, sequences: Sequence[Choosing]) -> list[list[Choice]]:
        """Return T choices for each sequence; see `engine.sampling`."""
        return choose(sequences, self.model.backend.chooser)

    def ranked(self, sequences: Sequence[Choosing], count: int) -> list[list[list[RankedToken]]]:
        """Return the tokens that may be chosen at each place; see `engine.sampling`."""
        return ranked(sequences, count, self.model.backend.ranker)

    def propose(self, rows: Sequence[HeadsRow]) -> list[tuple[int, ...]]:
        """Return what the heads draft for each row; to be called after each pass. See `HeadsDrafts.propose`."""
        return self._heads.propose(rows) if self._heads else [()] * len(rows)

    @property
    def depends_on_threads(self) -> bool:
        """Whether the last bits of strict results depend on the threads of a call, so that all must use the same."""
        return is_strict_by_shape(self.model, self._options)

    def record(self) -> None:
        """Record the passes that are likely, where passes are recorded, so that no call waits for it.

        Where kernels are compiled when they first run, run them. Raise StartupError when the cache left no memory.
        """
        with refusing_to_start(f"{self._setting} leaves no memory for passes that are recorded; give less"):
            if isinstance(self.passes, BlockPasses):
                self.passes.record(steps=self._options.takes_steps)
            elif self.model.backend.tables:
                self._run_once()

    def _run_once(self) -> None:
        """Run a pass of one token, and choose the next."""
        self.cache.keep("", 0, ())
        self.cache.append("", (0,))
        (logits,) = self.passes.run([Piece("", 0, (0,), 1)])
        self.choose([Choosing(logits, GREEDY, (0,))])
        self.release([""])

    def rollback(self, lengths: Iterable[SequenceLength], scope: str = "") -> list[RolledBack | PacelineError]:
        """Truncate each named sequence of the caller's scope; return what that freed, or why it failed."""
        return [self._rollback_one(one, scope) for one in lengths]

    def _rollback_one(self, one: SequenceLength, scope: str) -> RolledBack | PacelineError:
        if one.length < 0:
            return InvalidRequest(f"length is {one.length}; it cannot be negative", field="length")
        held_bytes = self.cache.held_bytes
        try:
            check_sequence_id(one.sequence_id)
            self.on_changed(scope + one.sequence_id)
            self.cache.truncate(scope + one.sequence_id, one.length)
        except PacelineError as error:
            return as_result(error)
        self.owners.named([scope + one.sequence_id], self.owners.caller(scope + one.sequence_id))
        return RolledBack(one.length, held_bytes - self.cache.held_bytes)

    def release(self, sequence_ids: Iterable[str], scope: str = "") -> int:
        """Free the named sequences of the caller's scope; return how many were held."""
        count, names = 0, [scope + one for one in sequence_ids]
        if self._heads:
            self._heads.end(names)  # by one pass for all
        for name in names:
            self.on_changed(name)
            self.owners.forget(name)
            self.room.forget(name)
            self._rules.forget(name)
            self._prefixes.forget(name)
            self._masks.forget(name)
            count += self.cache.release(name)
        return count

    def drop_idle(self) -> int:
        """Free the sequences that no call named for `sequence_ttl_s`; return how many."""
        oldest = self._clock() - self._options.sequence_ttl_s
        return self.release(self.owners.unnamed_since(oldest))


def _pass_size(running: Sequence[tuple[PackedRow, Piece]]) -> PassSize:
    counts = [len(piece.token_ids) for _, piece in running]
    prompts = [len(row.token_ids) - row.draft_count > DECODED_TOKENS for row, _ in running]
    return PassSize(
        len(counts), sum(counts), sum(count for count, prompt in zip(counts, prompts, strict=True) if prompt)
    )


def _identified(model: LoadedModel, options: EngineOptions, heads: HeadsDrafts | None) -> ModelDescription:
    # Where no row depends on others, padding changes no bit: so a model over stages, which pads nothing, is the same.
    pads = has_fixed_shapes(model, options) and not model.decoder.is_row_independent(options.layout)
    kernels = kernels_of(model, options.layout, fixed_shapes=pads)
    rank_count = model.group.place.grid.rank_count if model.group else 1
    compute = compute_of(torch.device(model.description.device), rank_count)
    described = replace(model.description, numerics=options.numerics, kernels=kernels, compute=compute)
    if heads:
        described = replace(described, heads=heads.kind, heads_draft_count=heads.draft_count)
    return replace(described, identity=ModelIdentity(model_digest(described), secrets.token_hex(16)))


def make_passes(model: LoadedModel, cache: KvCache, options: EngineOptions, features: Features | None) -> FastPasses:
    if is_strict_by_shape(model, options):
        return StrictPasses(model, cache, features)
    if has_fixed_shapes(model, options):
        assert isinstance(cache, KvPool)
        return BlockPasses(model, cache, features)
    if isinstance(model.decoder, NativeDecoder) and isinstance(cache, KvPool) and not features:
        return NativePasses(model, cache)
    return FastPasses(model, cache, features)


def is_strict_by_shape(model: LoadedModel, options: EngineOptions) -> bool:
    """Return whether strict results need calls that are all of one shape, because a row's depend on other rows."""
    return options.numerics == "strict" and not model.decoder.is_row_independent(options.layout)


def has_fixed_shapes(model: LoadedModel, options: EngineOptions) -> bool:
    """Return whether short rows take recorded passes."""
    if is_strict_by_shape(model, options) or options.layout == "dense" or model.group:
        return False  # what ranks tell each other cannot be recorded
    return options.fixed_shapes and model.backend.tables is not None


def make_cache(model: LoadedModel, options: EngineOptions, budget: Budget, heads: LoadedHeads | None) -> KvCache:
    """Lay out the cache that the options ask for, with layers for the heads.

    Raise StartupError when the cache could not hold a token or the memory cannot be had.
    """
    capacity_bytes, shape = budget.kv_bytes, cached_shape(model, heads)
    if heads and heads.layer_count and options.layout == "dense":
        raise StartupError("--heads keep keys and values, and --layout is dense; give --layout paged")
    with refusing_to_start(
        f"{budget.setting} is {capacity_bytes} bytes for the cache, more than can be had; "
        "give less, or a share of what is free such as 60%"
    ):
        cache = _lay_out(model, shape, options, capacity_bytes)
    if not cache.max_length:
        raise StartupError(
            f"{budget.setting} gives the cache {capacity_bytes} bytes, which hold no token of this "
            f"model; give it at least {cache.least_bytes} bytes, and more for longer and for several sequences"
        )
    return cache


def _lay_out(model: LoadedModel, shape: KvShape, options: EngineOptions, capacity_bytes: int) -> KvCache:
    if options.layout == "paged":
        return KvPool(
            shape,
            capacity_bytes,
            page_tokens=options.page_tokens,
            prefix_sharing=options.prefix_sharing,
            attention=StrictAttention if is_strict_by_shape(model, options) else model.backend.attention,
            lay_out=model.lay_out,
        )
    return DenseCache(shape, capacity_bytes)
