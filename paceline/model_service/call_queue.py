"""What waits for the model's thread, and what its next turn does: calls that are served together, or other work.

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
        self._worked = False
        """Whether the last turn did other work than calls."""
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
        """Take out what the next turn does: calls that are served together, or other work. Empty: nothing waits.

        Other work, such as freeing a sequence, is short and comes first, but only once between calls.
        """
        lines = sorted(self._lines.values(), key=lambda line: (line.start, line.number))
        work = [line.first for line in lines if not line.first.row_count]
        calls = [line for line in lines if line.first.row_count]
        if self._worked and calls or not work:
            turn = self._together([line.first for line in calls])
            self._charge(calls, turn)
        else:
            turn = work
        self._worked = turn is work
        for item in turn:
            self._lines[item.caller.name].items.popleft()
            self._close(item.caller.name)
        return turn

    def _together(self, calls: list[ItemT]) -> list[ItemT]:
        """Return the first call, and those of the others that fit beside it."""
        turn: list[ItemT] = []
        for call in calls:
            wider = [*turn, call]
            is_within = (
                sum(one.row_count for one in wider) <= self._bound.row_count
                and sum(one.token_count for one in wider) <= self._bound.token_count
            )
            if not turn or is_within and not any(one.sequence_ids & call.sequence_ids for one in turn):
                turn = wider
        return turn

    def _charge(self, lines: list[_Line[ItemT]], turn: list[ItemT]) -> None:
        """Note what callers got. Where all that waited are served, nobody has anything at another's cost."""
        if not turn:
            return
        self._now = lines[0].start
        if len(turn) == len(lines):
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
