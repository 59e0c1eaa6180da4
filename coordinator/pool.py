"""All sequences that are not ended: the live ones, which rounds are made of, and the queue behind them.

Owns places and order; knows nothing of services. A place that falls free is filled at once from the queue.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count

from coordinator.sequence import Sequence
from paceline.errors import Overloaded


class SequencePool:
    def __init__(
        self,
        capacity: int,
        queue_limit: int,
        clock: Callable[[], float] = time.perf_counter,
        arrivals: Iterator[int] | None = None,
    ) -> None:
        """`capacity` sequences are live at most, `queue_limit` wait. Pools that pass sequences on share `arrivals`."""
        self._clock = clock
        self._capacity = capacity
        self._queue_limit = queue_limit
        self._live_limit = capacity
        # Set by a preemption, cleared when a sequence ends: the limit rises only after an ending without one.
        self._under_pressure = False
        self._arrivals = count(1) if arrivals is None else arrivals
        self._waiting: deque[Sequence] = deque()
        # In order of last service, least recently served first; dicts keep insertion order.
        self._live: dict[Sequence, None] = {}
        self._in_flight: set[Sequence] = set()
        self._changed = asyncio.Event()

    @property
    def queue_limit(self) -> int:
        """Most sequences that may wait."""
        return self._queue_limit

    @property
    def waiting(self) -> list[Sequence]:
        """In the order in which they are to go live."""
        return list(self._waiting)

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def submit(self, sequences: Collection[Sequence]) -> None:
        """Add the sequences of one request, all or none; Overloaded when they would have to wait and cannot."""
        self.check_room(len(sequences))
        for sequence in sequences:
            sequence.arrival = next(self._arrivals)
            sequence.submitted_s = self._clock()
            self._waiting.append(sequence)
        self._refill()

    def check_room(self, count: int) -> None:
        """Raise Overloaded when so many more would have to wait and cannot."""
        free_count = max(0, self._live_limit - len(self._live) - len(self._waiting))
        if len(self._waiting) + count - free_count > self._queue_limit:
            raise Overloaded(
                f"{len(self._waiting)} of at most {self._queue_limit} sequences are waiting already; try again later"
            )

    def adopt(self, sequences: Iterable[Sequence]) -> None:
        """Take over sequences of another pool, in their order of arrival, however many wait already."""
        self._waiting = deque(sorted([*self._waiting, *sequences], key=lambda one: one.arrival))
        self._refill()

    def give_up(self) -> list[Sequence]:
        """Take out all sequences, none of which is in a round now, and return them in their order of arrival."""
        assert not self._in_flight
        given = sorted([*self._live, *self._waiting], key=lambda one: one.arrival)
        self._live.clear()
        self._waiting.clear()
        self._live_limit, self._under_pressure = self._capacity, False
        return given

    def window(self) -> list[Sequence]:
        """Live sequences that are in no round now, least recently served first."""
        return [sequence for sequence in self._live if sequence not in self._in_flight]

    @property
    def unserved_count(self) -> int:
        """Sequences that are in no round now, live or waiting."""
        return len(self._live) - len(self._in_flight) + len(self._waiting)

    async def ready(self) -> list[Sequence]:
        """Wait until the window is not empty, and return it."""
        while not (window := self.window()):
            await self.changed()
        return window

    async def changed(self) -> None:
        """Wait until a sequence joins, leaves or comes back from a round."""
        self._changed.clear()
        await self._changed.wait()

    def claim(self, group: Collection[Sequence]) -> list[float]:
        """Take sequences out of the window for a round; return how long each had waited for one, in seconds."""
        now = self._clock()
        for sequence in group:
            if sequence.first_grouped_s is None:
                sequence.first_grouped_s = now
            del self._live[sequence]
            self._live[sequence] = None
            self._in_flight.add(sequence)
        return [now - sequence.ready_since_s for sequence in group]

    def preempt(self) -> Sequence | None:
        """Send the youngest live sequence that is in no round back to the head of the queue, and return it.

        None when nothing would be gained: no other sequence is live. Fewer are live from then on, until one ends.
        """
        window = self.window()
        if len(self._live) < 2 or not window:
            return None
        youngest = max(window, key=lambda sequence: sequence.arrival)
        del self._live[youngest]
        self._waiting.appendleft(youngest)
        self._live_limit = len(self._live)
        self._under_pressure = True
        return youngest

    def settle(self, group: Iterable[Sequence]) -> list[Sequence]:
        """Put a round's sequences back; return those that ended and so left the pool."""
        self._in_flight.difference_update(group)
        for sequence in group:
            sequence.ready_since_s = self._clock()
            sequence.queued_s = 0.0
        return self.retire(group)

    def retire(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Drop the ended ones that are in no round; return those that had been live, for they may be cached."""
        gone = {one for one in sequences if one.ended and one not in self._in_flight}
        retired = [one for one in self._live if one in gone]
        for sequence in retired:
            del self._live[sequence]
        if retired:
            rise = 0 if self._under_pressure else len(retired)
            self._live_limit = min(self._capacity, self._live_limit + rise)
            self._under_pressure = False
        if len(retired) < len(gone):
            self._waiting = deque(one for one in self._waiting if one not in gone)
        self._refill()
        return retired

    def _refill(self) -> None:
        while self._waiting and len(self._live) < self._live_limit:
            sequence = self._waiting.popleft()
            now_s = self._clock()
            sequence.queued_s = now_s - max(sequence.submitted_s, sequence.ready_since_s)
            sequence.ready_since_s = now_s
            self._live[sequence] = None
        self._changed.set()
