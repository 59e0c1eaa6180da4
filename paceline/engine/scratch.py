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
        self._rooms: dict[str, torch.Tensor] = {}

    def room(self, name: str) -> Memory:
        def make(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            size_bytes = prod(shape) * dtype.itemsize
            held = self._rooms.get(name)
            if held is None or len(held) < size_bytes:
                # The system gets the smaller one back at once: the C library would keep it, and could not use it.
                held = self._rooms[name] = torch.frombuffer(mmap(-1, max(1, size_bytes)), dtype=torch.uint8)
            return held[:size_bytes].view(dtype).view(tuple(shape))

        return make
