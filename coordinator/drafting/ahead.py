"""Drafts made ahead: a drafter that goes on drafting while the target verifies.

With a single generation, the draft service has nothing to do during a verify. It then goes on as if all its drafts were
accepted: a guess of the target's next token, and drafts after that. If the target confirms all of this, the next round
has its drafts at once (the post-verify of PEARL, Liu et al., arXiv 2408.11850). If not, they are dropped, and the state
protocol makes the draft service forget them. Owns the calls ahead and the measure of whether they pay; knows nothing of
rounds.
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
from coordinator.smoothing import smoothed
from paceline.errors import PacelineError
from paceline.types import CallTiming, Proposal, Proposals, ProposeRow

log = structlog.get_logger()

LONGEST = 3
"""A round counts as at most this many mean rounds: a pause of the machine says nothing."""
WORTHWHILE = 0.98
"""Asking ahead pays if rounds with it take less than this share of the time of rounds without."""
PROBE_EVERY = 16
"""Rounds from one try of the slower way to the next."""


class AheadDrafter:
    """Wraps a drafter and is used in its place."""

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
        """Sequence ids of generations that have asked and may ask again."""
        self._asked: dict[str, _Ahead] = {}
        self._last: tuple[str, bool, float] | None = None
        """Sequence id, whether drafts were asked ahead, and time of the last round with one decoding generation."""
        self._times = _RoundTimes()
        self.asked_count = 0
        """Calls for drafts ahead."""
        self.used_count = 0
        """Calls ahead whose drafts a round used."""

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
        # A call ahead that is still running would cache tokens after the sequences were freed.
        await self._settled(sequence_ids)
        await self._drafter.release(sequence_ids)

    async def _call(self, rows: Sequence[ProposeRow], deadline: Deadline, waited_s: float) -> Proposals:
        """Ask now. The wait for the call ahead counts as time in the draft service's queue."""
        left_s = None if deadline.timeout_s is None else max(0.0, deadline.timeout_s - waited_s)
        proposals = await self._drafter.propose(rows, replace(deadline, timeout_s=left_s))
        timing = replace(proposals.timing, queued_s=proposals.timing.queued_s + waited_s)
        return replace(proposals, timing=timing)

    async def _settled(self, sequence_ids: Iterable[str]) -> "list[_Ahead]":
        """Take out the calls ahead for the sequences, and wait until they are answered or have failed."""
        asked = [self._asked.pop(one) for one in sequence_ids if one in self._asked]
        if asked:
            await asyncio.wait([one.answering for one in asked])
        return asked

    def _go_ahead(self, rows: Sequence[ProposeRow], proposals: Proposals, deadline: Deadline) -> None:
        """Ask for the tokens after all these drafts, if no other generation wants the draft service and it pays."""
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
        """Ask ahead; return None when there is no answer, which costs nothing but the drafts."""
        try:
            with self._traced():
                result = (await self._drafter.propose([row], deadline)).results[0]
        except PacelineError:
            return None
        except Exception:
            # A round reads this task's result: it would fail for a draft that it can do without.
            log.exception("drafting ahead failed unexpectedly")
            return None
        return result if isinstance(result, Proposal) else None

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """Trace the call ahead in a trace of its own, with a link to the round beside which it runs."""
        around = trace.get_current_span()
        if self._tracer is None or not around.is_recording():
            yield
            return
        links = [Link(around.get_span_context())]
        # No message of an exception goes into a span: it may quote a request.
        with self._tracer.start_as_current_span(
            "draft_ahead", Context(), links=links, record_exception=False, set_status_on_exception=False
        ):
            yield


@dataclass(frozen=True)
class _Ahead:
    row: ProposeRow
    answering: asyncio.Task[Proposal | None]

    def answer(self, row: ProposeRow) -> Proposal | None:
        """Return the drafts for the row; None unless it is the expected row, with the guess as its last token."""
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
    """Return the row that follows if all drafts are accepted. It asks for a guess and as many drafts again.

    It brings the last draft token, which is not cached.
    """
    drafts = proposal.draft_token_ids
    return ProposeRow(row.sequence_id, proposal.cached_length, drafts[-1:], len(drafts) + 1, None)


class _RoundTimes:
    """Mean times of whole rounds, with drafts asked ahead and without.

    They include all costs: the wait for a call made in vain, and a target slowed down by a draft on the same cores.
    """

    def __init__(self) -> None:
        self._means_s: dict[bool, float] = {}
        self._count = 0

    def add(self, is_ahead: bool, round_s: float) -> None:
        mean_s = self._means_s.get(is_ahead, round_s)
        self._means_s[is_ahead] = smoothed(mean_s, min(round_s, LONGEST * mean_s))

    def choose(self) -> bool:
        """Return whether to ask ahead now: the faster way, and now and then the other."""
        self._count += 1
        pays = len(self._means_s) < 2 or self._means_s[True] < WORTHWHILE * self._means_s[False]
        return pays != (self._count % PROBE_EVERY == 0)
