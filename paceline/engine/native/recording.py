"""Calls of kernels that are noted once and made again and again, all of a pass at once.

Python takes longer to begin a call than a small one lasts, and another of its threads may run in between. What a call
reads and writes stays where it is; only the numbers of rows differ from pass to pass.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.engine.native.structures import RecordedCall

TOKENS, WANTED = 0, 1
"""Which of a program's two counts is a call's number of rows."""
_NO_COUNT = -1


class Recording:
    def __init__(self, wanted: torch.Tensor) -> None:
        """Once rows are taken at the places `wanted`, calls have as many rows as there are of these; before, all."""
        self._wanted = wanted
        self._which = TOKENS
        self.calls: list[RecordedCall] = []
        self.held: list[Any] = []
        self.last: Any = None
        """The arguments of the last call."""

    def taking(self, places: torch.Tensor) -> None:
        """Note that the next call takes rows at these places."""
        if places is self._wanted:
            self._which = WANTED

    def add(
        self,
        function: Callable[..., None],
        call: ctypes.Structure,
        is_half: bool,
        held: Sequence[Any],
        *,
        has_count: bool,
    ) -> None:
        which = self._which if has_count else _NO_COUNT
        at = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
        self.calls.append(RecordedCall(at, ctypes.addressof(call), is_half, which))
        self.held += (call, *held)
        self.last = call


class Program:
    """The recorded calls in their order, and all that they read and write."""

    def __init__(self, recording: Recording) -> None:
        self.calls = (RecordedCall * len(recording.calls))(*recording.calls)
        self._held = recording.held
