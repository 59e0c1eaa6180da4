"""The plan of a pass over pages: which rows there are, and where their tokens lie. Every backend reads it.

It knows nothing of models, and nothing of how attention is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paceline.engine.interfaces import Span


class Segment(NamedTuple):
    """Slots [start, stop) of the pool's memory that hold neighbouring tokens of one sequence."""

    start: int
    stop: int


class Places(NamedTuple):
    """Where rows' cached tokens lie: token i is in slot `pages[i // page_tokens] * page_slots + i % page_tokens`."""

    pages: Sequence[Sequence[int]]
    page_tokens: int
    page_slots: int


@dataclass(frozen=True)
class BatchPlan:
    spans: Sequence[Span]
    pages: Sequence[Sequence[int]]
    """Each row's pages in order."""
    page_tokens: int

    @property
    def places(self) -> Places:
        return Places(self.pages, self.page_tokens, self.page_tokens)

    @cached_property
    def segments(self) -> list[list[Segment]]:
        """Segments of each row's cached tokens, the new ones included."""
        return [self._segments(pages, 0, span.length) for span, pages in zip(self.spans, self.pages, strict=True)]

    @cached_property
    def slots(self) -> list[int]:
        """Slots [T] of the new tokens."""
        return [
            slot
            for span, pages in zip(self.spans, self.pages, strict=True)
            for segment in self._segments(pages, span.base_length, span.length)
            for slot in range(segment.start, segment.stop)
        ]

    def _segments(self, pages: Sequence[int], first: int, last: int) -> list[Segment]:
        """Return the slots of the tokens [first, last) as maximal contiguous runs."""
        size = self.page_tokens
        segments: list[Segment] = []
        for position in range(first // size, -(-last // size)):
            start = pages[position] * size
            low, high = start + max(first - position * size, 0), start + min(last - position * size, size)
            if segments and segments[-1].stop == low:
                segments[-1] = Segment(segments[-1].start, high)
            else:
                segments.append(Segment(low, high))
        return segments
