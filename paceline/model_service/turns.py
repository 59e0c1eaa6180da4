"""Turns: which of a service's threads works with the model, in the order of the calls.

A call that only waits, for ranks that hold other layers, lets the next one begin meanwhile: so passes follow each other
through the stages, and calls go on in the order in which they let go: the other ranks keep that order too. Calls about
the same sequence never overlap, and work that names no sequences is done alone.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Turn:
    names: frozenset[str] | None
    """Sequences that the work is about; None for work that must be alone."""


class Turns:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Turn] = deque()
        self._begun: list[Turn] = []
        self._away: deque[object] = deque()
        """What let go and has not gone on yet, the first first."""
        self._ready_count = 0
        """Those of them that need not wait any more."""
        self._is_taken = False
        self.free_since_s = 0.0
        """When work last ended or let go, by `time.perf_counter`."""

    def queued(self, names: frozenset[str] | None = None) -> Turn:
        """Return a turn that begins after those before. `names` are of its sequences; None: while nothing is begun."""
        turn = Turn(names)
        with self._changed:
            self._waiting.append(turn)
        return turn

    def wait_until_free(self) -> None:
        """Wait until nobody works and nobody is ready to go on."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken and not self._ready_count)

    @contextmanager
    def taken(self, turn: Turn) -> Iterator[None]:
        """Work in the block, once the turn may begin."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_begin(turn))
            self._waiting.popleft()
            self._begun.append(turn)
            self._is_taken = True
        try:
            yield
        finally:
            with self._changed:
                self._begun.remove(turn)
                self._is_taken = False
                self.free_since_s = time.perf_counter()
                self._changed.notify_all()

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Let others work while the block waits; then go on before any other begins. Called with the turn taken."""
        own = object()
        with self._changed:
            self._away.append(own)
            self._is_taken = False
            self.free_since_s = time.perf_counter()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._ready_count += 1
                self._changed.wait_for(lambda: not self._is_taken and self._away[0] is own)
                self._away.popleft()
                self._ready_count -= 1
                self._is_taken = True

    def _may_begin(self, turn: Turn) -> bool:
        if self._is_taken or self._ready_count or self._waiting[0] is not turn:
            return False
        if turn.names is None or not self._begun:
            return not self._begun
        return all(one.names is not None and one.names.isdisjoint(turn.names) for one in self._begun)
