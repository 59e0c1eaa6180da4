"""Whose each cached sequence is, how old it is, and who gives up cache when there is no room.

Callers share the cache by age: the youngest sequence of all gives up its cache. But each caller is certain of a part of
its fair share, so that one whose sequences are many and old leaves room for the others. Between the sequences of one
caller the caller decides itself. What no call named for long goes first, because its caller may be gone. What callers
are certain of keeps no sequence waiting for ever: the oldest that lacked room long ago takes it from all younger ones,
and gives it to none of them. Knows nothing of pages.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from paceline.engine.interfaces import KvCache
from paceline.scope import Caller

IDLE_S = 30.0
"""Seconds without a call that names a sequence, after which it gives way to all of other callers."""
CERTAIN_SHARE = 2
"""One in this many tokens of a caller's fair share of the cache is not given to others."""
PATIENCE_S = 30.0
"""Seconds after its first lack of room from which the oldest such sequence goes before what others are certain of."""


@dataclass(slots=True)
class _Owned:
    caller: Caller
    number: int
    """Order in which sequences were first named."""
    named_s: float
    lacked_s: float | None = None
    """When it first found no room, or gave its cache up; None: it always had room."""


class Owners:
    def __init__(self, cache: KvCache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._owned: dict[str, _Owned] = {}
        self._numbers = count()

    def named(self, sequence_ids: Iterable[str], caller: Caller) -> None:
        """Note that a call of the caller named these sequences: they are its own, and needed."""
        now_s = self._clock()
        for one in sequence_ids:
            if one in self._owned:
                self._owned[one].caller, self._owned[one].named_s = caller, now_s
            else:
                self._owned[one] = _Owned(caller, next(self._numbers), now_s)

    def lacked(self, sequence_id: str) -> None:
        """Note that a sequence found no room, or gave its cache up."""
        owned = self._owned.get(sequence_id)
        if owned and owned.lacked_s is None:
            owned.lacked_s = self._clock()

    def forget(self, sequence_id: str) -> None:
        self._owned.pop(sequence_id, None)

    def unnamed_since(self, time_s: float) -> list[str]:
        return [one for one, owned in self._owned.items() if owned.named_s < time_s]

    def caller(self, sequence_id: str) -> Caller:
        owned = self._owned.get(sequence_id)
        return owned.caller if owned else Caller()

    def age_order(self, sequence_id: str) -> int:
        """Return a number that is larger for younger sequences; nobody's are the oldest."""
        owned = self._owned.get(sequence_id)
        return owned.number if owned else -1

    def victim(self, sequence_id: str, placed: Collection[str]) -> str | None:
        """Return the sequence that gives up its cache for this one, but for `placed` ones, which are in use.

        None: this one is to wait, or its caller has the youngest and decides.
        """
        if sequence_id not in self._owned:
            return None
        caller = self.caller(sequence_id)
        idle = [
            (self._owned[one].named_s, one)
            for one in self.unnamed_since(self._clock() - IDLE_S)
            if one not in placed and self._cache.length(one) and self.caller(one).name != caller.name
        ]
        if idle:
            return min(idle)[1]
        own_number, overdue = self._owned[sequence_id].number, self._overdue()
        certain = self._certain_callers(sequence_id)
        # A caller that is certain of more than it has takes from those that have more, whatever their age.
        least = -1 if caller.name in certain else own_number
        held = [(self._owned[one].number, one) for one in self._owned if one not in placed and self._cache.length(one)]
        younger = [(number, one) for number, one in held if number > least and self.caller(one).name not in certain]
        if overdue < own_number:  # no younger one takes from it
            younger = [found for found in younger if found[0] != overdue]
        elif overdue == own_number and not younger:  # only what callers are certain of is left
            younger = [found for found in held if found[0] > own_number]
        _, found = max(younger, default=(-1, None))
        return found if found is None or self.caller(found).name != caller.name else None

    def _overdue(self) -> int:
        """Return the number of the oldest sequence that lacked room long ago and is still wanted; -1 without any."""
        now_s = self._clock()
        numbers = (
            owned.number
            for owned in self._owned.values()
            if owned.lacked_s is not None and now_s - owned.lacked_s > PATIENCE_S and now_s - owned.named_s <= IDLE_S
        )
        return min(numbers, default=-1)

    def _certain_callers(self, sequence_id: str) -> set[str]:
        """Return the names of callers that hold no more than they are certain of."""
        held: dict[Caller, int] = {self.caller(sequence_id): 0}
        for one, owned in self._owned.items():
            if length := self._cache.length(one):
                held[owned.caller] = held.get(owned.caller, 0) + length
        total = sum(caller.weight for caller in held)
        most = self._cache.max_length / CERTAIN_SHARE
        return {caller.name for caller, length in held.items() if length <= most * caller.weight / total}


def fair_split(total: int, demands: Mapping[Caller, int]) -> dict[Caller, int]:
    """Split a total by the callers' weights; what one does not need goes to the others (max-min fairness)."""
    split: dict[Caller, int] = {}
    left, weight_left = total, sum(caller.weight for caller in demands)
    order = sorted(demands, key=lambda caller: demands[caller] / caller.weight)
    for caller in order:
        share = max(1, round(left * caller.weight / weight_left))
        split[caller] = share if caller is order[-1] else min(share, demands[caller])
        left -= split[caller]
        weight_left -= caller.weight
    return split
