"""Prepared rounds: a drafter that answers at once where the draft service has told its drafts before.

Rows ask the draft service to prepare (`ProposeRow.prepare_count`): while the target verifies, it goes on after likely
outcomes, and tells unasked what it chooses there (SSD, arXiv 2603.03251). If an outcome was among them, the round has
its drafts without a hop. The service still gets the row, in the background and in order, so that its cache follows and
it prepares the next rounds. A row is an ordinary one, so what is lost costs time alone.

Owns who is answered at once and what goes on in the background. Knows nothing of rounds.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Tracer

from coordinator.drafting.prepared_choices import PreparedChoices
from coordinator.drafting.preparing_worth import PreparingWorth
from coordinator.protocols import Deadline, Drafter
from paceline.errors import PacelineError
from paceline.types import PreparedDrafts, Proposal, Proposals, ProposeRow

log = structlog.get_logger()

PREPARE_COUNT = 120
"""Draft tokens prepared for a row."""
ANY_TIME = Deadline()


class PreparedDrafter:
    """Wraps a drafter and is used in its place."""

    def __init__(
        self, drafter: Drafter, tracer: Tracer | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._drafter = drafter
        self._tracer = tracer
        self._clock = clock
        self._choices = PreparedChoices()
        self._worth = PreparingWorth()
        self._arrived = asyncio.Event()
        """Set when choices come, by who waits for them cleared."""
        self._background: dict[asyncio.Task[None], frozenset[str]] = {}
        """Calls that no round waits for, with their sequence ids."""
        self.row_count = 0
        """Rows that drafts were prepared for, or would have been if there had been time."""
        self.hit_count = 0
        """Those of them that were answered without a call."""

    @property
    def max_length(self) -> int:
        return self._drafter.max_length

    @property
    def prefill_chunk_tokens(self) -> int:
        return self._drafter.prefill_chunk_tokens

    def take(self, prepared: Sequence[PreparedDrafts]) -> None:
        """Take in what a draft service told unasked."""
        for one in prepared:
            self._choices.add(one)
        self._arrived.set()

    def ready(self, row: ProposeRow) -> bool:
        """Return whether a row would be answered at once now."""
        return len(self._choices.drafts(row)) >= _enough(row)

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        if self._worth.choose(rows, self._clock()):
            rows = [replace(row, prepare_count=PREPARE_COUNT) for row in rows]
            self.row_count += sum(row.base_length > 0 for row in rows)
        for row in rows:
            self._choices.expect(row.sequence_id)
        hits = {index: _hit(row, self._choices.drafts(row)) for index, row in enumerate(rows) if self.ready(row)}
        self.hit_count += len(hits)
        if hits:
            told = [replace(rows[index], draft_count=len(hit.draft_token_ids)) for index, hit in hits.items()]
            # A task as in `_ask`, so that calls reach the drafter in their order.
            self._go_on(told, self._outlast(asyncio.create_task(self._tell(told)), told))
        missing = [row for index, row in enumerate(rows) if index not in hits]
        if not missing:
            return Proposals(list(hits.values()))
        asked = await self._ask(missing, deadline)
        found = iter(asked.results)
        return replace(asked, results=[hits[index] if index in hits else next(found) for index in range(len(rows))])

    async def release(self, sequence_ids: list[str]) -> None:
        self._choices.forget(sequence_ids)
        self._worth.forget(sequence_ids)
        # A call that is still under way would cache tokens after the sequences were freed.
        names = set(sequence_ids)
        if busy := [task for task, own in self._background.items() if own & names]:
            await asyncio.wait(busy)
        await self._drafter.release(sequence_ids)

    async def _ask(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        """Return the answer to the rows, or what was prepared for all of them, if that comes first."""
        if not any(row.prepare_count for row in rows):
            return await self._drafter.propose(rows, deadline)
        call = asyncio.create_task(self._drafter.propose(rows, deadline))
        try:
            while not call.done():
                self._arrived.clear()
                arrival = asyncio.create_task(self._arrived.wait())
                try:
                    await asyncio.wait((call, arrival), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    arrival.cancel()
                drafts = [self._choices.drafts(row) for row in rows]
                if not call.done() and all(len(one) == row.draft_count for one, row in zip(drafts, rows, strict=True)):
                    self._go_on(rows, self._outlast(call, rows))
                    self.hit_count += len(rows)
                    return Proposals([_hit(row, one) for row, one in zip(rows, drafts, strict=True)])
        except asyncio.CancelledError:
            call.cancel()
            raise
        return await call

    def _go_on(self, rows: Sequence[ProposeRow], work: Coroutine[None, None, None]) -> None:
        """Start work that no round waits for."""
        task = asyncio.create_task(work)
        self._background[task] = frozenset(row.sequence_id for row in rows)
        task.add_done_callback(self._background.pop)

    async def _tell(self, rows: Sequence[ProposeRow]) -> Proposals:
        """Bring rows to the draft service that have their drafts already."""
        with self._traced():
            return await self._drafter.propose(rows, ANY_TIME)

    async def _outlast(self, call: asyncio.Task[Proposals], rows: Sequence[ProposeRow]) -> None:
        """Wait for a call that nobody needs the answer of. What fails was not cached: its drafts end here."""
        lost: Iterable[str] = [row.sequence_id for row in rows]
        try:
            results = (await call).results
            pairs = zip(rows, results, strict=True)
            lost = [row.sequence_id for row, result in pairs if not isinstance(result, Proposal)]
        except PacelineError as error:
            log.debug("a draft service did not take what was prepared", error=str(error))
        except Exception:
            log.exception("a call in the background failed unexpectedly")
        self._choices.forget(lost)

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """Trace the call in a trace of its own, with a link to the round that did not wait for it."""
        around = trace.get_current_span()
        if self._tracer is None or not around.is_recording():
            yield
            return
        links = [Link(around.get_span_context())]
        # No message of an exception goes into a span: it may quote a request.
        with self._tracer.start_as_current_span(
            "draft_told", Context(), links=links, record_exception=False, set_status_on_exception=False
        ):
            yield


def _enough(row: ProposeRow) -> int:
    """Return the drafts for which a row does without a call: half of what it asks for is worth more at once."""
    return -(-row.draft_count // 2)


def _hit(row: ProposeRow, drafts: tuple[int, ...]) -> Proposal:
    # So much is cached when the service has taken the row, before any later one.
    return Proposal(drafts, row.base_length + len(row.token_ids) + len(drafts) - 1, prepared=True)
