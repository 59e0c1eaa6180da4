"""Full pages by the tokens they and all pages before them hold, so that equal beginnings are computed once.

Owns the table from content to page and the order in which unused pages go; knows nothing of tensors or sequences.
The idea is vLLM's automatic prefix caching: a page's key is a hash of its tokens and of the key of the page before.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


def root_key(scope: str) -> bytes:
    """What the first pages of a scope's sequences follow. Longer than a page's key, so never equal to one."""
    return blake2b(scope.encode(), digest_size=20).digest()


def page_key(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a page of `token_ids` that follows the page of key `previous`, or a root.

    A cryptographic hash, for a collision that can be made on purpose would show one client another's tokens.
    """
    return blake2b(previous + array("i", token_ids).tobytes(), digest_size=16).digest()


class PrefixIndex:
    """Key to page and back, and the pages that only the index still holds, least recently used first."""

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

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def add(self, key: bytes, page: int) -> bool:
        """Enter a page that a sequence holds; False when other memory holds the same tokens already."""
        if key in self._page_by_key or page in self._key_by_page:
            return False
        self._page_by_key[key] = page
        self._key_by_page[page] = key
        return True

    def rest(self, page: int) -> None:
        """No sequence holds the page any more: it may go, after those that rest longer."""
        self._idle[page] = None

    def wake(self, page: int) -> None:
        self._idle.pop(page, None)

    def forget(self, page: int) -> None:
        del self._page_by_key[self._key_by_page.pop(page)]
        self._idle.pop(page, None)

    def evict(self) -> int | None:
        """Forget the page that rests longest and return it; None when none rests."""
        if not self._idle:
            return None
        page = next(iter(self._idle))
        self.forget(page)
        return page
