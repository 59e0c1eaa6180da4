"""What waits for the model's thread, and what its next turn does: one piece of work, or calls that are served together.

A turn serves calls that wait when it begins, one of each caller at most, as many as a bound lets in; nobody waits for
company. What one caller sends is done in its order. Where the bound leaves calls out, callers have shares of the
tokens by their weights: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). Knows nothing of threads, models
and messages.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Protocol, TypeVar

from paceline.checks import MAX_ROWS
from paceline.scope import Caller


class Waiting(Protocol):
    @property
    def caller(self) -> Caller: ...
    @property
    def row_count(self) -> int:
        """Rows of a call; 0 for other work."""
        ...

    @property
    def token_count(self) -> int: ...

    @property
    def sequence_ids(self) -> frozenset[str]:
        """Sequences that no other call may name in the same turn."""
        ...


ItemT = TypeVar("ItemT", bound=Waiting)


@dataclass(frozen=True, slots=True)
class TurnBound:
    """What calls of one turn may have together. A single call may have more."""

    row_count: int = MAX_ROWS
    token_count: int = 512
    """With more than this a pass takes longer in proportion, so calls gain nothing by sharing it."""


ANY_CALLS = TurnBound()


@dataclass(eq=False)
class _Line(Generic[ItemT]):
    """What one caller waits for."""

    number: int
    start: float
    """Virtual time at which its first call may begin."""
    items: deque[ItemT] = field(default_factory=deque)

    @property
    def first(self) -> ItemT:
        return self.items[0]


class CallQueue(Generic[ItemT]):
    def __init__(self, bound: TurnBound) -> None:
        self._bound = bound
        self._lines: dict[str, _Line[ItemT]] = {}
        """Of callers for whom something waits."""
        self._finishes: dict[str, float] = {}
        """Virtual times at which callers' last calls ended, as far as these are still to come."""
        self._now = 0.0
        """Virtual time: tokens for each unit of weight."""
        self._numbers = count()

    def waiting(self) -> list[ItemT]:
        return [item for line in self._lines.values() for item in line.items]

    def add(self, item: ItemT) -> None:
        name = item.caller.name
        if name not in self._lines:
            self._lines[name] = _Line(next(self._numbers), max(self._now, self._finishes.get(name, 0.0)))
        self._lines[name].items.append(item)

    def remove(self, item: ItemT) -> None:
        """Take out an item, if it still waits."""
        line = self._lines.get(item.caller.name)
        if line and item in line.items:
            line.items.remove(item)
            self._close(item.caller.name)

    def take(self) -> list[ItemT]:
        """Take out what the next turn does: one piece of work, or else calls. Empty: nothing waits."""
        lines = sorted(self._lines.values(), key=lambda line: (line.first.row_count > 0, line.start, line.number))
        turn: list[ItemT] = []
        for line in lines:
            if self._joins(line.first, turn):
                turn.append(line.first)
        if turn and turn[0].row_count:
            self._now = lines[0].start
            self._charge(turn, is_contended=len(turn) < len(lines))
        for item in turn:
            self._lines[item.caller.name].items.popleft()
            self._close(item.caller.name)
        return turn

    def _joins(self, item: ItemT, turn: list[ItemT]) -> bool:
        if not turn:
            return True
        if not turn[0].row_count:
            return False
        together = [*turn, item]
        return (
            sum(one.row_count for one in together) <= self._bound.row_count
            and sum(one.token_count for one in together) <= self._bound.token_count
            and not any(one.sequence_ids & item.sequence_ids for one in turn)
        )

    def _charge(self, turn: list[ItemT], *, is_contended: bool) -> None:
        """Note what callers got. Where all that waited were served, nobody had anything at another's cost."""
        if not is_contended:
            self._finishes.clear()
            for line in self._lines.values():
                line.start = self._now
            return
        for item in turn:
            line = self._lines[item.caller.name]
            line.start += item.token_count / item.caller.weight
            self._finishes[item.caller.name] = line.start
        self._finishes = {name: time for name, time in self._finishes.items() if time > self._now}

    def _close(self, name: str) -> None:
        if not self._lines[name].items:
            del self._lines[name]
