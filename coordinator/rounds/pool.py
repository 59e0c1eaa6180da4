"""The pool of one target: its live generations, which groups are formed from, and those that wait for a place.

Owns places and order; knows nothing of services. A generation waits here if it gave its place up, or if it belongs to a
request with other generations here. A free place is filled from the waiting ones at once; if none waits, others are
told.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from coordinator.requests.generation import Generation
from coordinator.rounds.room_estimate import RoomEstimate


class GenerationPool:
    def __init__(
        self,
        capacity: int,
        clock: Callable[[], float] = time.perf_counter,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """At most `capacity` generations are live. `on_room` is called when the pool may take in more."""
        self._clock = clock
        self._capacity = capacity
        self._on_room = on_room
        self._room = RoomEstimate()
        self._waiting: deque[Generation] = deque()
        # In order of last service, least recently served first; dicts keep insertion order.
        self._live: dict[Generation, None] = {}
        self._in_flight: set[Generation] = set()
        # Generations with slow or silent readers: they hold no place, and their cache is taken back first.
        self._unread: dict[Generation, None] = {}
        self._paused: set[Generation] = set()
        self._changed = asyncio.Event()

    @property
    def live(self) -> Collection[Generation]:
        """Generations that have a place, in a round or not."""
        return self._live.keys()

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def generations(self) -> list[Generation]:
        return [*self._live, *self._waiting, *self._unread]

    @property
    def free_count(self) -> int:
        """Generations that may be taken in: none while some wait here, one beside others while the cache is scarce."""
        free = 0 if self._waiting else self._capacity - len(self._live)
        return min(free, 1) if self._room.is_scarce and self._live else free

    @property
    def resting(self) -> list[Generation]:
        """Generations without a place: they wait for one, or pause until more of their output is read."""
        return [*self._waiting, *self._unread]

    @property
    def unread_count(self) -> int:
        """Generations that pause until more of their output is read."""
        return len(self._unread)

    def adopt(self, generations: Collection[Generation]) -> None:
        """Take in generations in their order of arrival; those without a place wait for one here."""
        for generation in generations:
            generation.request.stream.tell_room(self._resume)
        self._wait(generations)
        self._refill()

    def _wait(self, generations: Collection[Generation]) -> None:
        self._waiting = deque(sorted([*self._waiting, *generations], key=lambda one: one.arrival))

    def give_up(self) -> list[Generation]:
        """Take out all generations; none of them may be in a round."""
        assert not self._in_flight
        given = self.generations
        self._live.clear()
        self._waiting.clear()
        self._unread.clear()
        self._room = RoomEstimate()
        return given

    def hand_over(self, generation: Generation) -> None:
        """Let a generation go on elsewhere; it is in no round and has not ended."""
        self._remove({generation})
        self._refill()
        self._tell_room()

    def window(self) -> list[Generation]:
        """Return the live generations that may begin a round now, least recently served first."""
        busy = self._in_flight | self._paused
        return [generation for generation in self._live if generation not in busy]

    @property
    def unserved_count(self) -> int:
        """Generations that are in no round now, live or waiting."""
        return len(self._live) - len(self._in_flight) + len(self._waiting)

    async def ready(self) -> list[Generation]:
        """Wait until the window is not empty, and return it."""
        while not (window := self.window()):
            await self.changed()
        return window

    async def changed(self) -> None:
        """Wait until a generation joins, leaves or comes back from a round."""
        self._changed.clear()
        await self._changed.wait()

    def claim(self, group: Collection[Generation]) -> list[float]:
        """Take generations out of the window for a round; return the seconds that each had waited for it."""
        now = self._clock()
        for generation in group:
            if generation.first_grouped_s is None:
                generation.begin_rounds(now)
            del self._live[generation]
            self._live[generation] = None
            self._in_flight.add(generation)
        return [now - generation.ready_since_s for generation in group]

    def victim(self) -> Generation | None:
        """Return the youngest generation that can give up cache, whether in a round or waiting.

        Generations with slow readers come first. Return None when nothing would be gained: no other generation is live.
        """
        if unread := [one for one in self._unread if one.target_cached_length]:
            return max(unread, key=lambda generation: generation.arrival)
        paused = [one for one in self._waiting if one.target_cached_length]
        live = list(self._live) if len(self._live) > 1 else []
        return max([*paused, *live], key=lambda generation: generation.arrival, default=None)

    def is_in_flight(self, generation: Generation) -> bool:
        return generation in self._in_flight

    def hold_back(self, generation: Generation) -> None:
        """Let a generation that is in a round begin no other before `let_in`, because it is to give up cache.

        Else other lanes could take it each time before whoever waits for its round to end.
        """
        self._paused.add(generation)

    def pause(self, generation: Generation) -> bool:
        """Make a live generation that is in no round wait; return False when it is not live.

        It stays in the pool until `let_in`, because its cache is about to change. After that it becomes live again when
        there seems to be room for all its tokens to come.
        """
        self._paused.add(generation)
        if generation not in self._live:
            return False
        del self._live[generation]
        self._wait([generation])
        return True

    def let_in(self) -> list[Generation]:
        """Allow paused generations to be live again; return those that ended meanwhile and so left the pool."""
        paused, self._paused = self._paused, set()
        ended = self.retire(paused)
        self._refill()
        return ended

    def ran_short(self, free_count: int) -> None:
        """Note that the target has room for what it caches now and `free_count` more tokens only."""
        self._room.ran_short(self.generations, free_count)

    def settle(self, group: Iterable[Generation]) -> list[Generation]:
        """Put a round's generations back; return those that ended and so left the pool."""
        self._in_flight.difference_update(group)
        now_s = self._clock()
        for generation in group:
            generation.ready_since_s = now_s
            generation.queued_s = 0.0
            if generation.is_unread and not generation.ended:
                self._set_aside(generation)
        return self.retire(group)

    def _set_aside(self, generation: Generation) -> None:
        """Give the place of a generation with a slow reader to another."""
        del self._live[generation]
        self._unread[generation] = None
        self._refill()
        self._tell_room()

    def _resume(self) -> None:
        """Take back the generations whose output was read."""
        resumed = [one for one in self._unread if not one.is_unread]
        for generation in resumed:
            del self._unread[generation]
        self.adopt(resumed)

    def retire(self, generations: Iterable[Generation]) -> list[Generation]:
        """Drop and return the given generations that are here and have ended, unless they are in a round or paused."""
        busy = self._in_flight | self._paused
        gone = {one for one in generations if one.ended and one not in busy}
        if not gone:
            self._changed.set()
            return []
        for generation in self._live.keys() & gone:
            self._room.ended(generation)
        retired = self._remove(gone)
        self._refill()
        self._tell_room()
        return retired

    def _remove(self, gone: set[Generation]) -> list[Generation]:
        """Take out the given generations, live, waiting or unread, and return them."""
        found = [one for one in self.generations if one in gone]
        for generation in found:
            self._live.pop(generation, None)
            self._unread.pop(generation, None)
        if any(one in gone for one in self._waiting):
            self._waiting = deque(one for one in self._waiting if one not in gone)
        return found

    def _refill(self) -> None:
        while self._waiting and self._may_go_live(self._waiting[0]):
            generation = self._waiting.popleft()
            now_s = self._clock()
            generation.queued_s = now_s - max(generation.request.submitted_s, generation.ready_since_s)
            generation.ready_since_s = now_s
            self._live[generation] = None
        self._changed.set()

    def _may_go_live(self, generation: Generation) -> bool:
        if len(self._live) >= self._capacity or generation in self._paused:
            return False
        return not self._live or self._room.fits(generation, self._live, self._waiting)

    def _tell_room(self) -> None:
        if self.free_count:
            self._on_room()
