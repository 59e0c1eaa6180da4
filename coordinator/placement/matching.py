"""Which waiting request goes to which target next: the oldest first, and each to a target that has its beginning.

Owns the order's exceptions. Where a target has room, younger requests whose beginnings it has may go before older ones
whose beginnings are elsewhere, but only so many and only so often (delay scheduling, Zaharia et al., EuroSys 2010). No
target stays idle for it. Knows nothing of rounds; `stickiness` knows who has which beginning.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from coordinator.placement.queue import WaitingQueue
from coordinator.placement.target import Target
from coordinator.replicas.stickiness import Stickiness
from coordinator.requests.generation import Generation

MOST_PASSES = 24
"""Those with many targets: looking costs the event loop time."""
PASSES_A_TARGET = 3
"""For each target, requests that are looked at, and times that one is passed over. With three targets and prompts that
are alike often enough, one in forty requests then goes where its beginning is not."""

Waiting = tuple[list[Generation], list[Target]]
"""The generations of a request, and the targets with room that may serve them."""


class Matching:
    def __init__(self) -> None:
        self._stickiness = Stickiness()

    def next(self, queue: WaitingQueue, targets: Sequence[Target]) -> tuple[Target, list[Generation]] | None:
        """Return what to place next and where; None when nothing that waits can be placed now.

        A target on trial gets a single generation, one that is unlikely to cause failures.
        """
        most_passes = min(PASSES_A_TARGET * len(targets), MOST_PASSES)
        waiting = list(islice(_placeable(queue, targets), most_passes))
        if not waiting:
            return None
        first, roomy = waiting[0]
        if (least_loaded := _least_loaded(roomy)).is_on_trial:
            return least_loaded, [queue.trial(first[0])]
        proven = [(together, [one for one in able if not one.is_on_trial]) for together, able in waiting]
        waiting = [(together, able) for together, able in proven if able]
        place, target = self._chosen(waiting, [one for one in targets if one.is_healthy], most_passes)
        together = waiting[place][0]
        for passed, _ in waiting[:place]:
            passed[0].request.passed_count += 1
        self._stickiness.note(target, targets, together[0].request.beginnings)
        return target, together

    def _chosen(self, waiting: Sequence[Waiting], serving: Sequence[Target], most_passes: int) -> tuple[int, Target]:
        """Return the place of the request that goes first, and its target."""
        for place, (together, roomy) in enumerate(waiting):
            able = [one for one in serving if one.address not in together[0].failed_at] or serving
            home = self._stickiness.home(able, serving, together[0].request.beginnings, len(together))
            if home is None or home in roomy:
                return place, home or _least_loaded(roomy)
            if together[0].request.passed_count >= most_passes:
                break
        else:
            place, (together, roomy) = 0, waiting[0]
        home = self._stickiness.home(roomy, serving, together[0].request.beginnings, len(together))
        return place, home or _least_loaded(roomy)


def can_take(generation: Generation, targets: Iterable[Target]) -> bool:
    """Return whether a target where the generation did not fail may be asked to serve it."""
    return any(one.is_usable and one.address not in generation.failed_at for one in targets)


def _placeable(queue: WaitingQueue, targets: Sequence[Target]) -> Iterator[Waiting]:
    """Yield what waits and may be placed now, the oldest first."""
    roomy = [target for target in targets if target.room]
    if not roomy:
        return
    for together in queue.parcels():
        able = [target for target in roomy if target.address not in together[0].failed_at]
        if able or not can_take(together[0], targets):
            yield together, able or roomy


def _least_loaded(targets: Iterable[Target]) -> Target:
    return min(targets, key=lambda target: target.load)
