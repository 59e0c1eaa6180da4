"""Checks that the prefix a row relies on is cached: as many tokens, and the same ones."""

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
    """Hashes of the prefixes that rows relied on, for the sequences in a cache."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._hashes: dict[str, PrefixHash] = {}

    def check(self, row: Relying) -> None:
        """Raise PrefixNotCached if the row relies on tokens that are not cached. Must be called for every row."""
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
        # The tokens after the base are about to be replaced by the row's own.
        known.cut(row.base_length)

    def forget(self, sequence_id: str) -> None:
        self._hashes.pop(sequence_id, None)
