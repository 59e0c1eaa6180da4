"""How many lanes run: by what a token takes with each number of them, for the rows at hand.

A second lane lets the draft work while the target verifies. Where nothing is drafted by a service it only takes time
from the target, on cores that all share. The number in use gives way to another that promises more; one that promises
less is tried again when the loss of a trial is a small share of the time since. Knows nothing of what rounds cost.
"""

from collections.abc import Mapping

WINDOWS = 4
"""Windows of the planner, of some rounds each, from one decision to the next: what each number promises takes as long
to work out as a window's own decision."""
TRIAL_WINDOWS = 2
"""Windows of a trial: its first rounds have groups of before."""
HYSTERESIS = 0.05
"""Share of the time that a change must promise to gain."""
TRIAL_SHARE = 0.005
"""Share of all time that trials may lose."""
LEAST_LOSS = 0.05
"""Share of a trial's time that it loses at least: a change by itself delays rounds."""


class LaneChoice:
    def __init__(self, most: int, *, is_free: bool) -> None:
        """Begin with `most` lanes, and keep to them if not `is_free`."""
        self.most = most
        self.count = most
        self._is_free = is_free and most > 1
        self._windows_left = WINDOWS
        self._unusual_count = 0
        """Rounds that began before the last change, or just after it, and so belong to no number of lanes."""
        self.is_trial = False
        """Whether the number in use is tried."""
        self._spent_s = 0.0
        """Seconds of rounds since the last trial."""
        self._trial_s = 0.0
        """Seconds of rounds of the last trial."""

    def passed(self, cycle_s: float) -> bool:
        """Note a round that has ended. Return whether it was one of the number in use from its beginning."""
        if self.is_trial:
            self._trial_s += cycle_s
        else:
            self._spent_s += cycle_s
        is_usual = not self._unusual_count
        self._unusual_count = max(0, self._unusual_count - 1)
        return is_usual

    def is_due(self) -> bool:
        """Return whether to decide now; asked before each window, when the planner decides too."""
        self._windows_left -= 1
        return self._is_free and self._windows_left <= 0

    def decide(self, known: Mapping[int, float]) -> None:
        """Choose the number for the next rounds, by the seconds of a token with each that was measured."""
        if self.count not in known:
            return  # what is in use is to be measured first
        self._windows_left = WINDOWS
        if unknown := [lanes for lanes in range(1, self.most + 1) if lanes not in known]:
            self._change(unknown[-1], is_trial=True)
            return
        best = min(known, key=lambda lanes: known[lanes] * (1 - HYSTERESIS * (lanes == self.count)))
        if best != self.count or self.is_trial:
            self._change(best, is_trial=False)
            return
        other = min((lanes for lanes in known if lanes != best), key=lambda lanes: known[lanes])
        loss = max(LEAST_LOSS, known[other] / known[best] - 1)
        if TRIAL_SHARE * self._spent_s > loss * self._trial_s:
            self._change(other, is_trial=True)

    def _change(self, count: int, *, is_trial: bool) -> None:
        if is_trial:
            self._spent_s = self._trial_s = 0.0
            self._windows_left = TRIAL_WINDOWS
        self.is_trial = is_trial
        if count != self.count:
            self.count = count
            self._unusual_count = 2 * self.most
