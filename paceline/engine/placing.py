"""The tokens of rows that their pass computes: all of a decoding row, and what the chunk allows of prompts.

It owns how prompts share the chunk: callers have fair shares of it. It knows nothing of models.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.checks import DECODED_TOKENS
from paceline.engine.interfaces import KvCache, let_go
from paceline.engine.options import EngineOptions
from paceline.engine.owners import Owners, fair_split
from paceline.engine.passes import Piece
from paceline.engine.room import CacheRoom
from paceline.errors import PacelineError, as_result
from paceline.scope import Caller

SCORED_LOGITS = 1 << 25
"""Most logits that a call makes for prompts of which all logits are wanted: 128 MiB of them in float32."""
FIRST_PROMPT_SHARE = 4
"""One in this many of a caller's prompt tokens belongs to its first prompt, however long that is."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """New tokens of one sequence, which follow its first `base_length` cached ones."""

    sequence_id: str
    base_length: int
    token_ids: tuple[int, ...]
    draft_count: int = 0
    """Number of trailing draft tokens; logits are wanted for them and for the token before them."""
    following_count: int = 0
    """Number of committed tokens that come with later rows; above 0 no logits are wanted, and there are no drafts."""
    is_scored: bool = False
    """Whether logits are wanted for all tokens, whatever the other fields say."""

    @property
    def length(self) -> int:
        return self.base_length + len(self.token_ids)

    @property
    def logit_count(self) -> int:
        if self.is_scored:
            return len(self.token_ids)
        return 0 if self.following_count else self.draft_count + 1


@dataclass(frozen=True, slots=True)
class _Wish:
    """The tokens that a row would run if the chunk had room for all of them."""

    row: PackedRow
    base_length: int
    token_ids: tuple[int, ...]
    """Tokens of the row after the cached ones."""

    @property
    def new_count(self) -> int:
        """Number of committed tokens to run."""
        return len(self.token_ids) - self.row.draft_count

    @property
    def lacking_count(self) -> int:
        """Number of committed tokens until the sequence can decode, those of later rows included."""
        return self.new_count + self.row.following_count

    @property
    def is_prompt(self) -> bool:
        return self.lacking_count > DECODED_TOKENS


class Placing:
    """Finds room in the cache for the rows of one pass, and shares the chunk of prompt tokens among them."""

    def __init__(
        self,
        cache: KvCache,
        owners: Owners,
        room: CacheRoom,
        options: EngineOptions,
        vocabulary_size: int,
        logit_count: int,
    ) -> None:
        """`logit_count` is of how many places a call holds logits."""
        self._cache = cache
        self._owners = owners
        self._room = room
        self._placed: set[str] = set()
        most_scored = max(1, min(logit_count, SCORED_LOGITS // vocabulary_size))
        self._scored_tokens = min(options.prefill_chunk_tokens, most_scored)
        self._chunk_tokens = options.prefill_chunk_tokens
        self._page_tokens = options.page_tokens

    def place(self, rows: Sequence[PackedRow]) -> list[Piece | PacelineError]:
        """Make room for each row's part in this pass, which may be empty; return it, or why the row cannot run.

        The oldest sequences come first, so that scarce room goes to them, whoever sent them.
        """
        order = sorted(range(len(rows)), key=lambda index: self._owners.age_order(rows[index].sequence_id))
        wishes = [self._keep(rows[index]) for index in order]
        shares = self._shares([one for one in wishes if isinstance(one, _Wish) and one.is_prompt and one.new_count])
        placed = [self._append(one, shares) if isinstance(one, _Wish) else one for one in wishes]
        return [piece for _, piece in sorted(zip(order, placed, strict=True), key=lambda pair: pair[0])]

    def _keep(self, row: PackedRow) -> _Wish | PacelineError:
        # Tokens whose logits are wanted must be computed, so they cannot be taken over.
        shareable = row.token_ids[: len(row.token_ids) - row.logit_count]
        try:
            self._room.check(row.sequence_id, is_relying=row.base_length > 0)
            base_length = self._cache.keep(row.sequence_id, row.base_length, shareable)
        except PacelineError as error:
            return as_result(error)
        return _Wish(row, base_length, row.token_ids[base_length - row.base_length :])

    def _shares(self, prompts: Sequence[_Wish]) -> dict[str, int]:
        """Return how many tokens of each prompt to run now, by sequence id; prompts that are not named wait."""
        callers: defaultdict[Caller, list[_Wish]] = defaultdict(list)
        for one in self._different(prompts):
            callers[self._owners.caller(one.row.sequence_id)].append(one)
        demands = {caller: sum(one.new_count for one in own) for caller, own in callers.items()}
        chunks = fair_split(self._chunk_tokens, demands)
        shares: dict[str, int] = {}
        for caller, own in callers.items():
            shares |= self._caller_shares(own, chunks[caller], max(1, self._scored_tokens // len(callers)))
        return shares

    def _caller_shares(self, computing: Sequence[_Wish], left: int, scored_left: int) -> dict[str, int]:
        """Share `left` tokens among prompts of one caller.

        The first prompt always gets its part, so that it makes progress. The rest goes to the prompts in the order of
        their remaining tokens, so that a short one does not wait for a long one. Scored prompts have `scored_left`
        tokens together, because of the memory for their logits.
        """
        shares, first = dict[str, int](), computing[0]
        # Scored tokens are shared evenly and the chunk by weight, so `left` may be less than a scored prompt's part.
        part = max(1, (scored_left if first.row.is_scored else left) // FIRST_PROMPT_SHARE)
        certain = min(first.new_count, part, left)
        left -= certain
        scored_left -= certain if first.row.is_scored else 0
        for one in sorted(computing, key=lambda wish: wish.lacking_count):
            own = certain if one is first else 0
            count = min(one.new_count, own + (min(left, scored_left) if one.row.is_scored else left))
            left -= count - own
            scored_left -= count - own if one.row.is_scored else 0
            shares[one.row.sequence_id] = count
        return shares

    def _different(self, prompts: Sequence[_Wish]) -> list[_Wish]:
        """Leave out prompts that begin like an earlier one: they take over its tokens with the next call."""
        found: list[_Wish] = []
        under_way: set[bytes] = set()
        for one in prompts:
            key = self._cache.next_key(one.row.sequence_id, one.token_ids[: one.new_count])
            if key is None or key not in under_way or one.row.is_scored:
                found.append(one)
            if key is not None:
                under_way.add(key)
        return found

    def _append(self, wish: _Wish, shares: Mapping[str, int]) -> Piece | PacelineError:
        row, count = wish.row, len(wish.token_ids)
        if wish.is_prompt:
            share = shares.get(row.sequence_id, 0)
            if share < wish.new_count or row.following_count:
                # A scored row takes nothing over, wherever it ends.
                count = share if row.is_scored else self._to_page(wish, share)
        try:
            self._room.check(row.sequence_id, is_relying=True)
        except PacelineError as error:
            return as_result(error)  # an older row of this pass took its cache
        try:
            if count:
                self._room.append(row.sequence_id, wish.token_ids[:count], self._placed)
        except PacelineError as error:
            let_go(self._cache, row.sequence_id, row.base_length)
            return as_result(error)
        self._placed.add(row.sequence_id)
        logit_count = row.logit_count if count == len(wish.token_ids) else 0
        return Piece(row.sequence_id, wish.base_length, wish.token_ids[:count], count if row.is_scored else logit_count)

    def _to_page(self, wish: _Wish, count: int) -> int:
        """Lower `count` so that the row ends with a page, because only then can it take over the next page.

        The count may become 0 only if the row took tokens over, because otherwise it would make no progress.
        """
        beyond_page = (wish.base_length + count) % self._page_tokens
        took_over = wish.base_length > wish.row.base_length
        return count - beyond_page if beyond_page < count or took_over else count
