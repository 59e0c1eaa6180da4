"""Whether a row relies on what is cached: so many tokens, and the same ones."""

from typing import Protocol

from paceline.engine.interfaces import KvCache, check_base
from paceline.errors import PrefixNotCached
from paceline.prefix_hash import PrefixHash


class Relying(Protocol):
    @property
    def sequence_id(self) -> str: ...
    @property
    def base_length(self) -> int: ...
    @property
    def base_hash(self) -> int | None: ...


class Prefixes:
    """Of the sequences in a cache: the hashes of what rows relied on."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._hashes: dict[str, PrefixHash] = {}

    def check(self, row: Relying) -> None:
        """Raise PrefixNotCached where the row relies on tokens that are not cached. Every row must come here."""
        check_base(row.sequence_id, row.base_length, self._cache.length(row.sequence_id))
        if not row.base_length:
            self.forget(row.sequence_id)
            return
        known = self._hashes.setdefault(row.sequence_id, PrefixHash())
        if row.base_hash is not None:
            found = known.of(self._cache.token_ids(row.sequence_id), row.base_length)
            if found != row.base_hash:
                raise PrefixNotCached(
                    f"base_hash of sequence {row.sequence_id!r} is {row.base_hash:#010x}, and the first "
                    f"{row.base_length} cached tokens have {found:#010x}; send the whole sequence with base_length 0"
                )
        # What follows them is dropped, for the row's own tokens.
        known.cut(row.base_length)

    def forget(self, sequence_id: str) -> None:
        self._hashes.pop(sequence_id, None)
