"""The sequences of one target that are not ended: the live ones, which rounds are made of, and a line behind them.

Owns places and order; knows nothing of services. In the line are those that gave their place up, and those whose
request has others here: they belong together. A place that falls free is filled from it at once, or told of.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from coordinator.requests.sequence import Sequence
from coordinator.rounds.cache_room import CacheRoom


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
        self._room = CacheRoom()
        self._waiting: deque[Sequence] = deque()
        # In order of last service, least recently served first; dicts keep insertion order.
        self._live: dict[Sequence, None] = {}
        self._in_flight: set[Sequence] = set()
        # Their readers are slow, or gone without a word: they hold no place, and what they cache is taken back first.
        self._unread: dict[Sequence, None] = {}
        self._paused: set[Sequence] = set()
        self._changed = asyncio.Event()

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self._live, *self._waiting, *self._unread]

    @property
    def free_count(self) -> int:
        """How many more may be taken in: none while some wait here, and one by one where the cache is full."""
        free = 0 if self._waiting else self._capacity - len(self._live)
        return min(free, 1) if self._room.is_scarce else free

    @property
    def unread_count(self) -> int:
        """Sequences that pause until more of them is read."""
        return len(self._unread)

    def adopt(self, sequences: Collection[Sequence]) -> None:
        """Take sequences in, in their order of arrival; those without a place wait for one here."""
        for sequence in sequences:
            sequence.request.stream.tell_room(self._resume)
        self._wait(sequences)
        self._refill()

    def _wait(self, sequences: Collection[Sequence]) -> None:
        self._waiting = deque(sorted([*self._waiting, *sequences], key=lambda one: one.arrival))

    def give_up(self) -> list[Sequence]:
        """Take out all sequences, none of which is in a round now."""
        assert not self._in_flight
        given = self.sequences
        self._live.clear()
        self._waiting.clear()
        self._unread.clear()
        self._room = CacheRoom()
        return given

    def hand_over(self, sequence: Sequence) -> None:
        """Let one go that is in no round, and not ended: it goes on elsewhere."""
        self._remove({sequence})
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

    def victim(self) -> Sequence | None:
        """The youngest sequence that can give something up, be it in a round, or waiting with what it still has.

        Those whose readers are slow come first.

        None when nothing would be gained: no other sequence is live.
        """
        if unread := [one for one in self._unread if one.target_cached_length]:
            return max(unread, key=lambda sequence: sequence.arrival)
        paused = [one for one in self._waiting if one.target_cached_length]
        live = list(self._live) if len(self._live) > 1 else []
        return max([*paused, *live], key=lambda sequence: sequence.arrival, default=None)

    def is_in_flight(self, sequence: Sequence) -> bool:
        return sequence in self._in_flight

    def pause(self, sequence: Sequence) -> bool:
        """Send a live sequence that is in no round back to its place in the line; return False for one that waits.

        It stays here until `let_in`, for what it caches is about to change. Then it is live again when there seems to
        be room for all that it will want.
        """
        self._paused.add(sequence)
        if sequence not in self._live:
            return False
        del self._live[sequence]
        self._wait([sequence])
        return True

    def let_in(self) -> list[Sequence]:
        """What was paused may be live again; return those that ended meanwhile, and so left the pool."""
        paused, self._paused = self._paused, set()
        ended = self.retire(paused)
        self._refill()
        return ended

    def ran_short(self, free_count: int) -> None:
        """The target has no room for more than what it caches now, and so many tokens beside."""
        self._room.ran_short(self.sequences, free_count)

    def settle(self, group: Iterable[Sequence]) -> list[Sequence]:
        """Put a round's sequences back; return those that ended and so left the pool."""
        self._in_flight.difference_update(group)
        for sequence in group:
            sequence.ready_since_s = self._clock()
            sequence.queued_s = 0.0
            if sequence.is_unread and not sequence.ended:
                self._set_aside(sequence)
        return self.retire(group)

    def _set_aside(self, sequence: Sequence) -> None:
        """Its reader is slow: another has its place."""
        del self._live[sequence]
        self._unread[sequence] = None
        self._refill()
        self._tell_room()

    def _resume(self) -> None:
        """Some of what was too much was read."""
        resumed = [one for one in self._unread if not one.is_unread]
        for sequence in resumed:
            del self._unread[sequence]
        self.adopt(resumed)

    def retire(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Drop those of the sequences that are here, ended, in no round and not paused, and return them."""
        busy = self._in_flight | self._paused
        gone = {one for one in sequences if one.ended and one not in busy}
        if not gone:
            self._changed.set()
            return []
        for sequence in self._live.keys() & gone:
            self._room.ended(sequence)
        retired = self._remove(gone)
        self._refill()
        self._tell_room()
        return retired

    def _remove(self, gone: set[Sequence]) -> list[Sequence]:
        """Take out those that are here, wherever that is."""
        found = [one for one in self.sequences if one in gone]
        for sequence in found:
            self._live.pop(sequence, None)
            self._unread.pop(sequence, None)
        if any(one in gone for one in self._waiting):
            self._waiting = deque(one for one in self._waiting if one not in gone)
        return found

    def _refill(self) -> None:
        while self._waiting and self._may_go_live(self._waiting[0]):
            sequence = self._waiting.popleft()
            now_s = self._clock()
            sequence.queued_s = now_s - max(sequence.request.submitted_s, sequence.ready_since_s)
            sequence.ready_since_s = now_s
            self._live[sequence] = None
        self._changed.set()

    def _may_go_live(self, sequence: Sequence) -> bool:
        if len(self._live) >= self._capacity or sequence in self._paused:
            return False
        return not self._live or self._room.fits(sequence, self._live, self._waiting)

    def _tell_room(self) -> None:
        if self.free_count:
            self._on_room()
