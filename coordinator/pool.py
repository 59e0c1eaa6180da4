"""The sequences of one target that are not ended: the live ones, which rounds are made of, and a line behind them.

Owns places and order; knows nothing of services. In the line are those that gave their place up, and those whose
request has others here: they belong together. A place that falls free is filled from it at once, or told of.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from coordinator.sequence import Sequence


class SequencePool:
    def __init__(
        self,
        capacity: int,
        clock: Callable[[], float] = time.perf_counter,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`capacity` sequences are live at most. `on_room` is called when there may be more to take in."""
        self._clock = clock
        self._capacity = capacity
        self._on_room = on_room
        self._live_limit = capacity
        # Set by a preemption, cleared when a sequence ends: the limit rises only after an ending without one.
        self._under_pressure = False
        self._waiting: deque[Sequence] = deque()
        # In order of last service, least recently served first; dicts keep insertion order.
        self._live: dict[Sequence, None] = {}
        self._in_flight: set[Sequence] = set()
        self._changed = asyncio.Event()

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def free_count(self) -> int:
        """Places for which nobody waits here."""
        return max(0, self._live_limit - len(self._live) - len(self._waiting))

    def adopt(self, sequences: Iterable[Sequence]) -> None:
        """Take sequences in, in their order of arrival; those without a place wait for one here."""
        self._waiting = deque(sorted([*self._waiting, *sequences], key=lambda one: one.arrival))
        self._refill()

    def give_up(self) -> list[Sequence]:
        """Take out all sequences, none of which is in a round now."""
        assert not self._in_flight
        given = [*self._live, *self._waiting]
        self._live.clear()
        self._waiting.clear()
        self._live_limit, self._under_pressure = self._capacity, False
        return given

    def hand_over(self, sequence: Sequence) -> None:
        """Let one go that is in no round, and not ended: it goes on elsewhere."""
        del self._live[sequence]
        self._refill()
        self._tell_room()

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
        """Drop those of the sequences that are here, ended and in no round, and return them."""
        gone = {one for one in sequences if one.ended and one not in self._in_flight}
        if not gone:
            self._changed.set()
            return []
        retired = [one for one in self._live if one in gone]
        waited = [one for one in self._waiting if one in gone]
        for sequence in retired:
            del self._live[sequence]
        if retired:
            rise = 0 if self._under_pressure else len(retired)
            self._live_limit = min(self._capacity, self._live_limit + rise)
            self._under_pressure = False
        if waited:
            self._waiting = deque(one for one in self._waiting if one not in gone)
        self._refill()
        self._tell_room()
        return retired + waited

    def _refill(self) -> None:
        while self._waiting and len(self._live) < self._live_limit:
            sequence = self._waiting.popleft()
            now_s = self._clock()
            sequence.queued_s = now_s - max(sequence.request.submitted_s, sequence.ready_since_s)
            sequence.ready_since_s = now_s
            self._live[sequence] = None
        self._changed.set()

    def _tell_room(self) -> None:
        if self.free_count:
            self._on_room()
