"""The share of accepted drafts, by the coordinator's count, computed from a finished text.

A draft can be accepted only if all drafts before it in its round were, and then it was made after the target's own
text. So the rounds follow from the positions of that text at which the draft's choice equals the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import pstdev

DRAFT_COUNT = 5
"""Drafts a round: the paper's and the coordinator's own default."""


@dataclass(frozen=True)
class MeasuredAcceptance:
    share: float
    """Accepted share of all drafts together."""
    spread: float
    """Standard deviation between prompts."""
    first_half: float
    second_half: float
    """Shares in the two halves of the outputs; equal when acceptance does not change along an output."""
    token_count: int


def count_drafts(agrees: Sequence[bool]) -> tuple[int, int]:
    """Return how many drafts the rounds of one output make, and how many of them are accepted."""
    drafted = accepted = position = 0
    while position < len(agrees):
        asked = min(DRAFT_COUNT, len(agrees) - position - 1)
        right = sum(1 for _ in takewhile(bool, agrees[position : position + asked]))
        drafted, accepted, position = drafted + asked, accepted + right, position + right + 1
    return drafted, accepted


def measure(outputs: Sequence[Sequence[bool]]) -> MeasuredAcceptance:
    """Summarise the agreement of each output, position by position."""
    shares = [_share([output]) for output in outputs]
    return MeasuredAcceptance(
        share=_share(outputs),
        spread=pstdev(shares),
        first_half=_share([output[: len(output) // 2] for output in outputs]),
        second_half=_share([output[len(output) // 2 :] for output in outputs]),
        token_count=sum(map(len, outputs)),
    )


def _share(outputs: Sequence[Sequence[bool]]) -> float:
    counts = [count_drafts(output) for output in outputs]
    drafted = sum(one for one, _ in counts)
    return sum(one for _, one in counts) / drafted if drafted else 0.0
