"""The tokens of a call's rows that its pass computes: all of a decoding row, and what the chunk allows of prompts.

It owns how prompts share the chunk, and makes room in the cache. It knows nothing of models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.checks import DECODED_TOKENS
from paceline.engine.interfaces import KvCache, let_go
from paceline.engine.options import EngineOptions
from paceline.engine.passes import Piece
from paceline.errors import PacelineError

CERTAIN_SHARE = 4
"""One in this many of a call's prompt tokens belongs to the call's first prompt, however long that is."""


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

    @property
    def logit_count(self) -> int:
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
    """Finds room in the cache for the rows of one call, and shares the chunk of prompt tokens among them."""

    def __init__(self, cache: KvCache, options: EngineOptions) -> None:
        self._cache = cache
        self._chunk_tokens = options.prefill_chunk_tokens
        self._page_tokens = options.page_tokens

    def place(self, rows: Sequence[PackedRow]) -> list[Piece | PacelineError]:
        """Make room for each row's part in this pass, which may be empty; return it, or why the row cannot run."""
        wishes = [self._keep(row) for row in rows]
        shares = self._shares([one for one in wishes if isinstance(one, _Wish) and one.is_prompt and one.new_count])
        return [self._append(one, shares) if isinstance(one, _Wish) else one for one in wishes]

    def _keep(self, row: PackedRow) -> _Wish | PacelineError:
        # Tokens whose logits are wanted must be computed, so they cannot be taken over.
        shareable = row.token_ids[: len(row.token_ids) - row.logit_count]
        try:
            base_length = self._cache.keep(row.sequence_id, row.base_length, shareable)
        except PacelineError as error:
            return error
        return _Wish(row, base_length, row.token_ids[base_length - row.base_length :])

    def _shares(self, prompts: Sequence[_Wish]) -> dict[str, int]:
        """Return how many tokens of each prompt to run now, by sequence id; prompts that are not named wait.

        The first prompt always gets its part of the chunk, so that it makes progress. The rest of the chunk goes to the
        prompts in the order of their remaining tokens, so that a short one does not wait for a long one.
        """
        computing = self._different(prompts)
        certain = min(computing[0].new_count, max(1, self._chunk_tokens // CERTAIN_SHARE)) if computing else 0
        left, shares = self._chunk_tokens - certain, dict[str, int]()
        for one in sorted(computing, key=lambda wish: wish.lacking_count):
            own = certain if one is computing[0] else 0
            count = min(one.new_count, left + own)
            left -= count - own
            shares[one.row.sequence_id] = count
        return shares

    def _different(self, prompts: Sequence[_Wish]) -> list[_Wish]:
        """Leave out prompts that begin like an earlier one: they take over its tokens with the next call."""
        found: list[_Wish] = []
        under_way: set[bytes] = set()
        for one in prompts:
            key = self._cache.next_key(one.row.sequence_id, one.token_ids[: one.new_count])
            if key is None or key not in under_way:
                found.append(one)
            if key is not None:
                under_way.add(key)
        return found

    def _append(self, wish: _Wish, shares: Mapping[str, int]) -> Piece | PacelineError:
        row, count = wish.row, len(wish.token_ids)
        if wish.is_prompt:
            share = shares.get(row.sequence_id, 0)
            is_part = share < wish.new_count or row.following_count
            count = self._to_page(wish, share) if is_part else count
        try:
            if count:
                self._cache.append(row.sequence_id, wish.token_ids[:count])
        except PacelineError as error:
            let_go(self._cache, row.sequence_id, row.base_length)
            return error
        whole = count == len(wish.token_ids)
        return Piece(row.sequence_id, wish.base_length, wish.token_ids[:count], row.logit_count if whole else 0)

    def _to_page(self, wish: _Wish, count: int) -> int:
        """Lower `count` so that the row ends with a page, because only then can it take over the next page.

        The count may become 0 only if the row took tokens over, because otherwise it would make no progress.
        """
        beyond_page = (wish.base_length + count) % self._page_tokens
        took_over = wish.base_length > wish.row.base_length
        return count - beyond_page if beyond_page < count or took_over else count
