"""Texts in which the places are found where given tokens stood before: the ground of all sources without a model.

A *place* is the number of tokens before it, so the token at a place is what followed them. `native/suffixes.cpp` finds
them. Knows nothing of what is done with the places.
"""

from array import array
from collections.abc import Sequence

from coordinator.drafting.native import Library

COMPARED = 8
"""Most tokens before a place that are compared: the longest match of a search."""
MOST_PLACES = 4
"""Places that a search finds at most, as in `suffixes.cpp`."""


class _NativeText:
    """A text of the library's; it takes 16 bytes a token of room beside the ids."""

    def __init__(self, library: Library, at: int | None) -> None:
        self.library, self.at = library, at
        if at is None:
            raise MemoryError("a text cannot be indexed: it is too long, or memory is short")

    def __del__(self) -> None:
        self.library.delete_text(self.at)


class IndexedText(_NativeText):
    """A whole text, as `CommittedTokens` keeps a prompt. It shares the token ids with their owner; neither changes."""

    def __init__(self, library: Library, token_ids: "array[int]") -> None:
        """Index the text, which takes about 20 ns a token. Any thread may do it, and others run meanwhile."""
        self.token_ids = token_ids
        self._held = memoryview(token_ids)
        """An array with a view refuses to move."""
        super().__init__(library, library.index_text(token_ids.buffer_info()[0], len(token_ids)))

    def after(self, place: int, most: int) -> list[int]:
        """Return the tokens at a place, at most `most`."""
        return self.token_ids[place : place + most].tolist()

    def find(self, latest_token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return lengths and places of the latest matches with a context's latest tokens, of which `COMPARED` count.

        They are those of at least four tokens, or of one where there are none.
        """
        latest = array("i", latest_token_ids)
        lengths, places = (array("q", bytes(8 * MOST_PLACES)) for _ in range(2))
        written = (one.buffer_info()[0] for one in (lengths, places))
        count = self.library.find(self.at, latest.tobytes(), len(latest), *written)
        return list(zip(lengths[:count], places[:count], strict=True))


class GrowingText(_NativeText):
    """A text with room for tokens to come."""

    def __init__(self, library: Library, room: int) -> None:
        super().__init__(library, library.text_with_room(room))
        self.left_count = room

    def extend(self, token_ids: Sequence[int]) -> None:
        assert len(token_ids) <= self.left_count
        self.left_count -= self.library.extend_text(self.at, array("i", token_ids).tobytes(), len(token_ids))
