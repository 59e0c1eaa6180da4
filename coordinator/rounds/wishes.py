"""Wishes: the drafts that a generation is to have in a round, and from which source.

A planner makes them and a round carries them out; neither can change an output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coordinator.requests.generation import Generation
from coordinator.requests.guess import Guess
from coordinator.rounds.round_report import RoundReport
from paceline.types import DraftSource


@dataclass(slots=True)
class Wish:
    asked_count: int = 0
    """Most tokens to ask a draft service for; 0: none is asked."""
    draft_model: str = ""
    """Model of the draft service to ask."""
    source: DraftSource | None = None
    """Source of `token_ids`."""
    token_ids: tuple[int, ...] = ()
    """Tokens at hand. They are used when no draft service gives any."""
    guesses: Mapping[DraftSource, Guess] = field(default_factory=dict)
    """What all sources at hand had: each is compared with what is committed, used or not."""
    propose_count: int = 0
    """Most tokens that the target's heads are to draft for the next round."""
    planned_count: int = 0
    """What its planner had chosen for the whole round: the next is planned before this one is learned from."""

    @property
    def most(self) -> int:
        """Most drafts that the generation can have."""
        return max(self.asked_count, len(self.token_ids))


class DraftPlanner(Protocol):
    @property
    def leeway(self) -> float:
        """Factor on the worth of drafts above which a slow draft service is at fault."""
        ...

    @property
    def lane_count(self) -> int:
        """Lanes that are to run now."""
        ...

    def plan(self, group: Sequence[Generation], max_lengths: Mapping[str, int]) -> dict[Generation, Wish]:
        """Return a wish for each generation of the group, in its order.

        `max_lengths` has the models that can be asked now, with the most tokens of a generation that they draft for.
        """
        ...

    def observe(self, wishes: Mapping[Generation, Wish], report: RoundReport, cycle_s: float) -> None:
        """Learn from a round that ran with `wishes`.

        `cycle_s` is its time since its rows were ready, in which each lane runs one; where groups run one after
        another, the time of as many rounds as there may be lanes (`TurnTimes`).
        """
        ...
