"""Room in the cache for the rows of a pass: where there is none, the youngest sequence of another caller gives its up.

A sequence that gave up its cache is refused once, by the CacheFull that its row would have met had it come first; so
its coordinator pauses it, and sends it whole later.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from paceline.engine.interfaces import KvCache
from paceline.engine.owners import Owners
from paceline.errors import CacheFull


class CacheRoom:
    def __init__(self, cache: KvCache, owners: Owners, on_changed: Callable[[str], None]) -> None:
        """`on_changed` is called with the id of a sequence before it is freed."""
        self._cache = cache
        self._owners = owners
        self._on_changed = on_changed
        self._lost_bytes: dict[str, int] = {}
        """Sequences that gave up their cache and were not told yet, with what they had."""
        self._running: set[str] = set()
        """Sequences of passes that are under way: one that waits for other ranks lets another begin."""

    @contextmanager
    def kept(self, sequence_ids: Collection[str]) -> Iterator[None]:
        """Let nobody take the cache of these sequences while the block runs; no other block may name them meanwhile."""
        self._running.update(sequence_ids)
        try:
            yield
        finally:
            self._running.difference_update(sequence_ids)

    def append(self, sequence_id: str, token_ids: Sequence[int], placed: Collection[str]) -> None:
        """Append tokens to a sequence; `placed` ones keep their cache. Raise CacheFull as the cache does."""
        while True:
            try:
                return self._cache.append(sequence_id, token_ids)
            except CacheFull:
                victim = self._owners.victim(sequence_id, self._running.union(placed))
                if victim is None:
                    self._owners.lacked(sequence_id)
                    raise
                self._take_back(victim)
                if not self._cache.length(sequence_id):  # the refusal forgot it
                    self._cache.keep(sequence_id, 0, ())

    def check(self, sequence_id: str, *, is_relying: bool) -> None:
        """Raise CacheFull, once, for a row that relies on a cache that was given up."""
        lost_bytes = self._lost_bytes.pop(sequence_id, None)
        if lost_bytes is not None and is_relying:
            raise CacheFull(
                f"the cache has no room: sequence {sequence_id!r} gave up its {lost_bytes} bytes for an older one; "
                "send it whole when others have ended, or raise --kv-memory",
                {"missing_bytes": str(lost_bytes), "cached_length": "0"},
            )

    def tell_again(self, sequence_id: str, lost_bytes: int) -> None:
        """Raise CacheFull once more for a sequence whose caller was not told of the first."""
        self._lost_bytes[sequence_id] = lost_bytes

    def forget(self, sequence_id: str) -> None:
        self._lost_bytes.pop(sequence_id, None)

    def _take_back(self, sequence_id: str) -> None:
        self._owners.lacked(sequence_id)
        held_bytes = self._cache.held_bytes
        self._on_changed(sequence_id)
        self._cache.release(sequence_id)
        self._lost_bytes[sequence_id] = held_bytes - self._cache.held_bytes
