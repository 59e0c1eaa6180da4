"""How often the draft is right, estimated as rounds go by."""

MEMORY = 0.97
"""Weight of a sequence's earlier rounds after one more: the last ten alone tell more of luck than of the text."""
SHARED_MEMORY = 0.99
"""The same for all sequences together, which add a round each."""
PRIOR_WEIGHT = 16.0
"""Drafts that the prior rate counts for."""


class Acceptance:
    """Share of right drafts at the places the draft was asked about, recent rounds first."""

    def __init__(self, prior_rate: float = 0.7, memory: float = MEMORY) -> None:
        self._memory = memory
        self._right = PRIOR_WEIGHT * prior_rate
        self._asked = PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self._right / self._asked

    def add(self, accepted_count: int, drafted_count: int) -> None:
        """Learn from a round. What lies after the first wrong draft tells nothing."""
        if drafted_count:
            self._right = self._memory * self._right + accepted_count
            self._asked = self._memory * self._asked + min(accepted_count + 1, drafted_count)
