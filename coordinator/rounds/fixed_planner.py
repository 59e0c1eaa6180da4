"""A fixed draft count: each generation gets at most so many drafts, from the source that promises most of them."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from coordinator.requests.generation import Generation
from coordinator.rounds.outlook import FREE, NO_OPTION, Outlook
from coordinator.rounds.outlooks import Outlooks
from coordinator.rounds.round_report import RoundReport
from coordinator.rounds.wishes import Wish


class FixedPlanner:
    leeway: ClassVar[float] = 1.0

    def __init__(self, count: int, heads_count: int = 0, *, lanes: int = 1) -> None:
        """`heads_count` is the most tokens that the target's heads draft."""
        self.lane_count = lanes
        self._count = count
        self._outlooks = Outlooks(count, heads_count)

    def plan(self, group: Sequence[Generation], draft_models: Sequence[str]) -> dict[Generation, Wish]:
        return {one.generation: self._wish(one) for one in self._outlooks.of(group, draft_models)}

    def _wish(self, outlook: Outlook) -> Wish:
        at_hand = outlook.at_hand(FREE, self._count) if outlook.guess_chances else NO_OPTION
        asked = outlook.asked(FREE, self._count)
        heads_count = outlook.propose_count(FREE, self._count) if outlook.heads_chances else 0
        return outlook.wish(asked if outlook.prefers(asked, at_hand) else NO_OPTION, at_hand, heads_count)

    def observe(self, wishes: Mapping[Generation, Wish], report: RoundReport, cycle_s: float) -> None:
        self._outlooks.observe(wishes, report)
