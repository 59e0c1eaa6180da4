"""What the first rank tells the others, as numbers: a message is read as it was written, and carries no code.

The others keep no books: pages, lengths and copies are those of the first rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from paceline.engine.interfaces import Span
from paceline.engine.plan import BatchPlan

Copy = tuple[int, int, int]
"""Target slot, source slot, and how many slots are copied."""


@dataclass(frozen=True)
class LayOut:
    """Lay out slots, as many pages as all ranks have room for, in place of those before."""

    page_count: int
    page_tokens: int
    is_strict: bool
    """Whether attention pads to shapes that depend on positions alone (`attention.strict`)."""


@dataclass(frozen=True)
class RunPass:
    plan: BatchPlan
    """Its spans name no sequences."""
    copies: Sequence[Copy]
    """What is copied from slots to slots before the pass."""
    token_ids: Sequence[int]
    """Padding included."""
    wanted: Sequence[int]
    most_threads: int | None = None
    """Threads that the first rank may use for this pass at most, as other services of its machine want cores too."""
    experts_are_same: bool = False
    """Whether all tokens go to the same experts (`model.experts`)."""


@dataclass(frozen=True)
class Beat:
    """Answer: the group lives."""


@dataclass(frozen=True)
class End:
    """End the process."""


Message = LayOut | RunPass | Beat | End


def to_numbers(message: Message) -> list[int]:
    match message:
        case End():
            return [0]
        case Beat():
            return [1]
        case LayOut(page_count, page_tokens, is_strict):
            return [2, page_count, page_tokens, is_strict]
        case RunPass(plan, copies, token_ids, wanted, most_threads, experts_are_same):
            counts = len(plan.spans), len(copies), len(token_ids), len(wanted), most_threads or 0, experts_are_same
            spans = [(one.start, one.stop, one.length) for one in plan.spans]
            pages = [(len(one), *one) for one in plan.pages]
            return [3, plan.page_tokens, *counts, *chain(*spans, *pages, *copies, token_ids, wanted)]


def from_numbers(numbers: Sequence[int]) -> Message:
    rest = iter(numbers)
    match next(rest):
        case 0:
            return End()
        case 1:
            return Beat()
        case 2:
            page_count, page_tokens, is_strict = rest
            return LayOut(page_count, page_tokens, bool(is_strict))
        case kind:
            assert kind == 3, f"no message has the number {kind}"
            return _pass_of(rest)


def _pass_of(rest: Iterator[int]) -> RunPass:
    page_tokens, span_count, copy_count, token_count, wanted_count, most_threads, experts_are_same = islice(rest, 7)
    spans = [Span("", *islice(rest, 3)) for _ in range(span_count)]
    pages = [[*islice(rest, next(rest))] for _ in range(span_count)]
    copies = [(next(rest), next(rest), next(rest)) for _ in range(copy_count)]
    plan = BatchPlan(spans, pages, page_tokens)
    token_ids, wanted = [*islice(rest, token_count)], [*islice(rest, wanted_count)]
    return RunPass(plan, copies, token_ids, wanted, most_threads or None, bool(experts_are_same))
