"""The committed tokens of a generation: a prompt that all outputs of its request share, then its own output.

The prompt is kept as packed numbers: copying or freeing a million of them takes next to no time.
"""

from array import array
from collections.abc import Iterable
from itertools import islice
from typing import Protocol, Self, overload

_CHUNK_TOKENS = 4096
"""Token ids converted at a time; other threads may run in between."""


class TokenList(Protocol):
    """Token ids that grow at their end; a list is one."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, place: int, /) -> int: ...
    @overload
    def __getitem__(self, place: slice, /) -> list[int]: ...
    def __iadd__(self, token_ids: list[int], /) -> Self: ...


class CommittedTokens:
    def __init__(self, prompt: "array[int]") -> None:
        self.prompt = prompt
        """Token ids as `packed` returns them; never changed."""
        self._prompt_count = self._length = len(prompt)
        self._output: list[int] = []

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int, /) -> int: ...
    @overload
    def __getitem__(self, place: slice, /) -> list[int]: ...
    def __getitem__(self, place: int | slice, /) -> int | list[int]:
        prompt_count = self._prompt_count
        if isinstance(place, int):
            place = range(self._length)[place]
            return self.prompt[place] if place < prompt_count else self._output[place - prompt_count]
        if place.step not in (None, 1):
            raise ValueError(f"token ids are taken in their order and not with step {place.step}")
        start, stop = place.start or 0, self._length if place.stop is None else place.stop
        if start < 0 or stop < 0:
            start, stop, _ = place.indices(self._length)
        if start >= prompt_count:
            return self._output[start - prompt_count : stop - prompt_count] if stop > start else []
        return self.prompt[start:stop].tolist() + self._output[: max(0, stop - prompt_count)]

    def __iadd__(self, token_ids: list[int], /) -> Self:
        self._output += token_ids
        self._length += len(token_ids)
        return self


def packed(token_ids: Iterable[int]) -> "array[int]":
    """Return token ids as `CommittedTokens` keeps a prompt."""
    prompt, left = array("i"), iter(token_ids)
    while chunk := list(islice(left, _CHUNK_TOKENS)):
        prompt.fromlist(chunk)
    return prompt
