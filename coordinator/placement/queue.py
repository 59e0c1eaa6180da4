"""What waits for a target: one queue for all of them, in order of arrival.

Owns the order and the limit. Who takes what is for the dispatcher to say; knows nothing of targets.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count, groupby

from coordinator.requests.generation import Generation, Request
from paceline.errors import Overloaded


class WaitingQueue:
    def __init__(self, limit: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """`limit` generations wait at most. What comes back from a target is taken whatever the limit."""
        self.limit = limit
        self._clock = clock
        self._arrivals = count(1)
        # A dict for its order: the oldest first.
        self._waiting: dict[Generation, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._waiting)

    def check_room(self, sequence_count: int, free_count: int, unread_count: int = 0) -> None:
        """Raise Overloaded where so many generations would have to wait and cannot.

        `free_count` places are free; `unread_count` generations pause for slow readers, and count as waiting.
        """
        waiting_count = len(self) + unread_count
        if waiting_count + sequence_count - free_count > self.limit:
            raise Overloaded(
                f"{waiting_count} of at most {self.limit} generations are waiting already; try again later"
            )

    def add(self, request: Request) -> None:
        """Take in a new request."""
        request.arrival, request.submitted_s = next(self._arrivals), self._clock()
        self._waiting.update(dict.fromkeys(request.unfinished))

    def put_back(self, generations: Iterable[Generation]) -> None:
        """Take generations whose target is gone, ahead of all that came later."""
        self._waiting = dict.fromkeys(sorted([*self._waiting, *generations], key=lambda one: one.arrival))

    def parcels(self) -> Iterator[list[Generation]]:
        """Yield what waits, the generations of a request together, the oldest first. Nothing may change meanwhile."""
        for _, together in groupby(self._waiting, key=lambda one: one.request):
            yield list(together)

    def trial(self, otherwise: Generation) -> Generation:
        """Return what to try a doubtful target with: the newest of those that nothing ever failed of."""
        clean = (one for one in self._waiting if not one.is_suspect)
        return max(clean, key=lambda one: one.arrival, default=otherwise)

    def remove(self, generations: Iterable[Generation]) -> list[Generation]:
        """Take out those of the generations that wait, and return them."""
        found = [one for one in generations if one in self._waiting]
        for one in found:
            del self._waiting[one]
        return found
