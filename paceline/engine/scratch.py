"""Memory that passes of a model use again and again: it grows with the largest pass, and with nothing else.

The C library would leave holes between results of many sizes, and take two to three times as much.
"""

import threading
from collections.abc import Callable, Sequence
from math import prod
from mmap import mmap

import torch

Memory = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Makes room for a result of a shape and dtype, on a CPU; its numbers are anything."""


def new_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


class Scratch(threading.local):
    """Rooms by name, of each thread its own. What is made in one is lost when the same name is asked for again."""

    def __init__(self) -> None:
        self._rooms: dict[str, _Room] = {}

    def room(self, name: str) -> Memory:
        found = self._rooms.get(name)
        if found is None:
            found = self._rooms[name] = _Room()
        return found


class _Room:
    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)
        self._asked: tuple[Sequence[int], torch.dtype] | None = None
        self._made = self._held
        """What was made last, which has what was asked."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        asked = shape, dtype
        # The layers of a pass ask for the same one after another, and a view takes longer than a small norm.
        if asked != self._asked:
            self._asked, self._made = asked, self._view(shape, dtype)
        return self._made

    def _view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size_bytes = prod(shape) * dtype.itemsize
        if len(self._held) < size_bytes:
            # The system gets the smaller one back at once: the C library would keep it, and could not use it.
            self._held = torch.frombuffer(mmap(-1, size_bytes), dtype=torch.uint8)
        return self._held[:size_bytes].view(dtype).view(tuple(shape))
