"""The index of full pages by the tokens in them and in all pages before, so that equal beginnings are computed once.

It owns the table from content to page and the order in which idle pages are evicted; it knows nothing of tensors or
sequences. The idea is vLLM's automatic prefix caching: a page's key hashes its tokens and the key of the page before.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


def root_key(scope: str) -> bytes:
    """Return the key before the first pages of a scope's sequences. It is longer than a page's key, so never equal."""
    return blake2b(scope.encode(), digest_size=20).digest()


def page_key(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a page of `token_ids` whose predecessor, a page or a root, has the key `previous`.

    The hash is cryptographic, because a deliberate collision would show one client another's tokens.
    """
    return blake2b(previous + array("i", token_ids).tobytes(), digest_size=16).digest()


class PrefixIndex:
    """Maps keys to pages and back, and keeps the idle pages, which only the index holds, least recently used first."""

    def __init__(self) -> None:
        self._page_by_key: dict[bytes, int] = {}
        self._key_by_page: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    def find(self, key: bytes) -> int | None:
        return self._page_by_key.get(key)

    def holds(self, page: int) -> bool:
        return page in self._key_by_page

    def add(self, key: bytes, page: int) -> bool:
        """Enter a page that a sequence holds; return False when the key or the page is entered already."""
        if key in self._page_by_key or page in self._key_by_page:
            return False
        self._page_by_key[key] = page
        self._key_by_page[page] = key
        return True

    def rest(self, page: int) -> None:
        """Mark a page as idle: no sequence holds it, and it may be evicted after those that were idle before."""
        self._idle[page] = None

    def wake(self, page: int) -> None:
        self._idle.pop(page, None)

    def forget(self, page: int) -> None:
        del self._page_by_key[self._key_by_page.pop(page)]
        self._idle.pop(page, None)

    def evict(self) -> int | None:
        """Forget the page that was idle longest and return it; None when none is idle."""
        if not self._idle:
            return None
        page = next(iter(self._idle))
        self.forget(page)
        return page
