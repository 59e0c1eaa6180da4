"""The queue of generations that wait for a target: one for all targets, in order of arrival.

Owns the order and the limit. The dispatcher decides who takes what; the queue knows nothing of targets.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import count, groupby

from coordinator.requests.generation import Generation, Request
from paceline.errors import Overloaded


class WaitingQueue:
    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        """At most `limit` generations wait. Those that come back from a target are taken beyond the limit too."""
        self.limit = limit
        self._clock = clock
        self._arrivals = count(1)
        # A dict keeps the order: the oldest first.
        self._waiting: dict[Generation, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._waiting)

    def check_room(self, generation_count: int, free_count: int, unread_count: int = 0) -> None:
        """Raise Overloaded when `generation_count` more generations fit neither in `free_count` free places nor here.

        `unread_count` generations pause for slow readers, and count as waiting.
        """
        waiting_count = len(self) + unread_count
        if waiting_count + generation_count - free_count > self.limit:
            raise Overloaded(
                f"there is no room for {generation_count} more: {waiting_count} of at most {self.limit} generations "
                "are waiting already; try again later"
            )

    def add(self, request: Request) -> None:
        request.arrival, request.submitted_s = next(self._arrivals), self._clock()
        self._waiting.update(dict.fromkeys(request.unfinished))

    def put_back(self, generations: Iterable[Generation]) -> None:
        """Take back generations whose target is gone, ahead of all that arrived later."""
        self._waiting = dict.fromkeys(sorted([*self._waiting, *generations], key=lambda one: one.arrival))

    def parcels(self) -> Iterator[list[Generation]]:
        """Yield the waiting generations request by request, the oldest first. The queue must not change meanwhile."""
        for _, together in groupby(self._waiting, key=lambda one: one.request):
            yield list(together)

    def trial(self, otherwise: Generation) -> Generation:
        """Return a generation to try a doubtful target with: the newest that is not suspect, else `otherwise`."""
        clean = (one for one in self._waiting if not one.is_suspect)
        return max(clean, key=lambda one: one.arrival, default=otherwise)

    def remove(self, generations: Iterable[Generation]) -> list[Generation]:
        """Take out the given generations that wait, and return them."""
        found = [one for one in generations if one in self._waiting]
        for one in found:
            del self._waiting[one]
        return found
