"""Drafts made ahead: a drafter that goes on drafting while the target verifies.

While one generation is all there is, its draft service has nothing to do during a verify. It goes on then as if all its
drafts were accepted: a guess of the target's own token, and drafts after that. Where the target says just this, the
next round has its drafts at once (the post-verify of PEARL, Liu et al., arXiv 2408.11850); where it says anything else
they are dropped, and the state protocol makes the draft forget them. Owns what was asked ahead, and the measure of
whether that pays; knows nothing of rounds.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Tracer

from coordinator.protocols import Deadline, Drafter
from coordinator.rounds.smoothing import smoothed
from paceline.errors import PacelineError
from paceline.types import CallTiming, Proposal, Proposals, ProposeRow

log = structlog.get_logger()

LONGEST = 3
"""A round counts as no longer than so many usual ones: a pause of the machine says nothing."""
WORTHWHILE = 0.98
"""Rounds with drafts asked ahead must take so much of those without, or less."""
PROBE_EVERY = 16
"""Rounds after which the other way is tried."""


class AheadDrafter:
    """Is to a scheduler what the drafter within is."""

    def __init__(
        self,
        drafter: Drafter,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter = drafter
        self._tracer = tracer
        self._clock = clock
        self._live: set[str] = set()
        """Generations that have asked and may ask again."""
        self._asked: dict[str, _Ahead] = {}
        self._last: tuple[str, bool, float] | None = None
        """The generation that last had drafts alone, beyond its prompt; whether more were asked ahead; and when."""
        self._times = _RoundTimes()
        self.asked_count = 0
        """Calls for drafts ahead."""
        self.used_count = 0
        """Those whose drafts were what a round asked for."""

    @property
    def max_length(self) -> int:
        return self._drafter.max_length

    @property
    def prefill_chunk_tokens(self) -> int:
        return self._drafter.prefill_chunk_tokens

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        self._live.update(row.sequence_id for row in rows)
        began_s = self._clock()
        asked = await self._settled(row.sequence_id for row in rows)
        waited_s = self._clock() - began_s
        proposal = asked[0].answer(rows[0]) if asked and len(rows) == 1 else None
        if proposal:
            self.used_count += 1
            proposals = Proposals([proposal], CallTiming(queued_s=waited_s))
        else:
            proposals = await self._call(rows, deadline, waited_s)
        self._go_ahead(rows, proposals, deadline)
        return proposals

    async def release(self, sequence_ids: list[str]) -> None:
        self._live.difference_update(sequence_ids)
        # What is still being made for them would be cached after they were freed.
        await self._settled(sequence_ids)
        await self._drafter.release(sequence_ids)

    async def _call(self, rows: Sequence[ProposeRow], deadline: Deadline, waited_s: float) -> Proposals:
        """Ask now. The wait for what was asked ahead is a wait in the draft's line."""
        left_s = None if deadline.timeout_s is None else max(0.0, deadline.timeout_s - waited_s)
        proposals = await self._drafter.propose(rows, replace(deadline, timeout_s=left_s))
        timing = replace(proposals.timing, queued_s=proposals.timing.queued_s + waited_s)
        return replace(proposals, timing=timing)

    async def _settled(self, sequence_ids: Iterable[str]) -> "list[_Ahead]":
        """Take out what was asked ahead for the generations, answered or failed by now."""
        asked = [self._asked.pop(one) for one in sequence_ids if one in self._asked]
        if asked:
            await asyncio.wait([one.answering for one in asked])
        return asked

    def _go_ahead(self, rows: Sequence[ProposeRow], proposals: Proposals, deadline: Deadline) -> None:
        """Ask for what follows if all drafts are accepted, where nobody else wants the draft and it pays."""
        row, proposal, last = rows[0], proposals.results[0], self._last
        self._last = None
        if len(self._live) != 1 or not isinstance(proposal, Proposal) or not proposal.draft_token_ids:
            return
        now_s = self._clock()
        if last and last[0] == row.sequence_id:
            self._times.add(last[1], now_s - last[2])
        ahead = _row_ahead(row, proposal)
        goes_ahead = ahead.base_length + ahead.draft_count <= self._drafter.max_length and self._times.choose()
        if goes_ahead:
            self.asked_count += 1
            answering = asyncio.create_task(self._call_ahead(ahead, deadline))
            self._asked[row.sequence_id] = _Ahead(ahead, answering)
        if row.base_length:
            self._last = row.sequence_id, goes_ahead, now_s

    async def _call_ahead(self, row: ProposeRow, deadline: Deadline) -> Proposal | None:
        """Ask; None where there is no answer, which costs no more than that."""
        try:
            with self._traced():
                result = (await self._drafter.propose([row], deadline)).results[0]
        except PacelineError:
            return None
        except Exception:
            # A round asks for what came of it: it would fail of a draft that it can do without.
            log.exception("drafting ahead failed unexpectedly")
            return None
        return result if isinstance(result, Proposal) else None

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """In a trace of its own: it belongs to no round's time. It links the round that it runs beside."""
        around = trace.get_current_span()
        if self._tracer is None or not around.is_recording():
            yield
            return
        links = [Link(around.get_span_context())]
        with self._tracer.start_as_current_span("draft_ahead", Context(), links=links):
            yield


@dataclass(frozen=True)
class _Ahead:
    row: ProposeRow
    answering: asyncio.Task[Proposal | None]

    def answer(self, row: ProposeRow) -> Proposal | None:
        """What was found for the row, which must be the one that was expected, with the guess as its last token."""
        found = None if self.answering.cancelled() else self.answering.result()
        if found is None or len(found.draft_token_ids) < 2:
            return None
        guess, *drafts = found.draft_token_ids[: row.draft_count + 1]
        expected = replace(
            self.row, token_ids=(*self.row.token_ids, guess), draft_count=row.draft_count, base_hash=row.base_hash
        )
        length = row.base_length + len(row.token_ids)
        return Proposal(tuple(drafts), length + len(drafts) - 1) if row == expected else None


def _row_ahead(row: ProposeRow, proposal: Proposal) -> ProposeRow:
    """After all drafts, the last of which is not cached: a guess, and as many drafts again."""
    drafts = proposal.draft_token_ids
    return ProposeRow(row.sequence_id, proposal.cached_length, drafts[-1:], len(drafts) + 1, None)


class _RoundTimes:
    """What a round takes with drafts asked ahead and without, on average: all that asking ahead can change.

    Waiting for what was asked in vain is in it, and a target that is slower beside a draft on the same cores.
    """

    def __init__(self) -> None:
        self._means_s: dict[bool, float] = {}
        self._count = 0

    def add(self, is_ahead: bool, round_s: float) -> None:
        mean_s = self._means_s.get(is_ahead, round_s)
        self._means_s[is_ahead] = smoothed(mean_s, min(round_s, LONGEST * mean_s))

    def choose(self) -> bool:
        """Whether to ask ahead now: what was faster, and now and then the other."""
        self._count += 1
        pays = len(self._means_s) < 2 or self._means_s[True] < WORTHWHILE * self._means_s[False]
        return pays != (self._count % PROBE_EVERY == 0)
