"""How groups are formed: of how many rows, by which planner, and how many of them are in flight.

A coordinator that has a target to itself has two groups in flight: the draft works for one while the target verifies
the other. Coordinators that share a target fill each other's pauses, so one group of twice the rows does as well, with
half the rounds. That a target is shared is told by its answers: how long it has worked, for all. Knows nothing else of
rounds.
"""

from dataclasses import dataclass

from coordinator.rounds.draft_worth import DraftWorth
from coordinator.rounds.turn_times import TurnTimes
from coordinator.rounds.wishes import DraftPlanner

ROUNDS = 32
"""Rounds from one decision to the next."""
SHARED, ALONE = 0.25, 0.1
"""Share of the target's work that is for others, above which it is shared, and below which it is so no more."""


@dataclass(frozen=True)
class Groups:
    """One way to form them."""

    size: int
    """Most rows of a group."""
    planner: DraftPlanner
    """Plans their drafts, and how many are in flight. Groups of other sizes have other prices, so it is for these."""
    draft_worth: DraftWorth
    """The worth of their drafts."""
    turn_times: TurnTimes
    """What their rounds take where they take turns."""


class Grouping:
    def __init__(self, alone: Groups, shared: Groups | None = None) -> None:
        """`shared` is for a target that works for others too; None: the same as for one that does not."""
        self.is_shared = False
        """Whether the target works for others too."""
        self._alone = alone
        self._shared = shared
        self._round_count = 0
        """Rounds since the last decision."""
        self._own_s = self._all_s = 0.0
        """Seconds of the target's work meanwhile, for this coordinator and for all."""
        self._worked_s: float | None = None
        """Seconds that it had worked at the latest answer; None before the first."""

    def observe(self, own_s: float, worked_s: float, round_s: float) -> bool:
        """Note a round that took `round_s`, `own_s` of it work of the target. Return whether `is_shared` changed.

        When it answered it had worked `worked_s` since its start, for all; 0: it does not tell.
        """
        before_s = self._worked_s
        if before_s is not None and before_s - round_s < worked_s < before_s:
            worked_s = before_s  # an older answer, of a round that had more to wait for; a restart falls further
        self._worked_s = worked_s
        if before_s is None:
            return False
        # What it did for others before the round says nothing: there may have been nothing to do here.
        self._all_s += min(max(0.0, worked_s - before_s), round_s)
        self._own_s += own_s
        self._round_count += 1
        if self._round_count < ROUNDS:
            return False
        before = self.is_shared
        self.is_shared = self._all_s - self._own_s > (ALONE if before else SHARED) * self._all_s
        self._round_count, self._own_s, self._all_s = 0, 0.0, 0.0
        return self.is_shared is not before

    def now(self, most_rows: int, *, is_near: bool) -> Groups:
        """Return the way to form groups now, where services take calls of at most so many rows.

        Where services are far, others do not fill the pauses: two groups hide each other's ways.
        """
        shared = self._shared
        if shared and self.is_shared and is_near and shared.size <= most_rows:
            return shared
        return self._alone
