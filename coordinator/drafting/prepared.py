"""Prepared rounds: a drafter that answers at once where the draft service has told its drafts before.

Rows ask the draft service to prepare (`ProposeRow.prepare_count`): while the target verifies, it goes on after likely
outcomes, and tells unasked what it chooses there (SSD, arXiv 2603.03251). If an outcome was among them, the round has
its drafts without a hop. The service still gets the row, in the background and in order, so that its cache follows and
it prepares the next rounds. A row is an ordinary one, so what is lost costs time alone: where the service took less of
it than the round was told, the next round waits for the service's own word.

Owns who is answered at once and what goes on in the background. Knows nothing of rounds.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Tracer

from coordinator.drafting.answered import Answered
from coordinator.drafting.patience import Patience
from coordinator.drafting.prepared_choices import PreparedChoices
from coordinator.drafting.preparing_worth import Begun, PreparingWorth
from coordinator.protocols import ANY_TIME, Deadline, Drafter
from paceline.checks import DECODED_TOKENS
from paceline.errors import PacelineError
from paceline.prefix_hash import extended_hash
from paceline.tasks import kept_task
from paceline.types import PreparedDrafts, Proposal, Proposals, ProposeRow

log = structlog.get_logger()

PREPARE_COUNT = 120
"""Draft tokens prepared for a row."""


class PreparedDrafter:
    """Wraps a drafter and is used in its place."""

    def __init__(
        self,
        drafter: Drafter,
        clock: Callable[[], float],
        tracer: Tracer | None = None,
        *,
        may_prepare: bool = True,
        has_room_beside_target: Callable[[], bool] = lambda: True,
    ) -> None:
        """`may_prepare` False asks for nothing to be prepared, so that every round waits for its call.

        `has_room_beside_target` returns whether a draft service and a target are known not to compute on the same
        cores or device.
        """
        self._drafter = drafter
        self._may_prepare = may_prepare
        self._tracer = tracer
        self._clock = clock
        self._choices = PreparedChoices()
        self._worth = PreparingWorth(has_room_beside_target)
        self._answered = Answered()
        self._patience = Patience(self._answered.tokens)
        self._arrived = asyncio.Event()
        """Set when choices come, by who waits for them cleared."""
        self._background: dict[asyncio.Task[None], frozenset[str]] = {}
        """Calls that no round waits for, with their sequence ids."""
        self._ending: set[asyncio.Task[None]] = set()
        """What waits for such calls, to free their sequences."""
        self._ended: dict[str, object] = {}
        """Sequences that are to be freed then, each with the occasion at which it ended."""
        self._doubtful: set[str] = set()
        """Sequences of which the service holds less than rounds were told."""
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

    @property
    def max_rows(self) -> int:
        return self._drafter.max_rows

    def take(self, prepared: Sequence[PreparedDrafts]) -> None:
        """Take in what a draft service told unasked."""
        for one in prepared:
            self._choices.add(one)
        self._arrived.set()

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        if self._ended:
            for row in rows:
                self._ended.pop(row.sequence_id, None)  # it is used again: who leaves it says so again
        if not self._may_prepare or all(row.following_count for row in rows):
            # Parts of prompts that the target takes in too are no round, and nothing follows them.
            return await self._drafter.propose(rows, deadline)
        began_s = self._clock()
        self._patience.asked(rows, began_s)
        self._answered.asked(rows)
        begun = self._worth.begin(rows, began_s)
        if prepares := begun.prepares:
            rows = [replace(row, prepare_count=PREPARE_COUNT) for row in rows]
            self.row_count += sum(row.base_length > 0 for row in rows)
            for row in rows:
                self._choices.expect(row.sequence_id)
        else:
            self._choices.forget(row.sequence_id for row in rows)
        proposals = self._known(rows, 0.0)
        if proposals:
            told = [replace(row, draft_count=len(self._choices.drafts(row)) or row.draft_count) for row in rows]
            self._go_on(told, asyncio.create_task(self._tell(told)), proposals)
        elif prepares or self._background:
            proposals = await self._ask(rows, deadline, began_s)
        else:
            proposals = await self._drafter.propose(rows, deadline)
            self._called(rows, began_s, proposals)
        self._note(rows, proposals, begun)
        return proposals

    def _called(self, rows: Sequence[ProposeRow], began_s: float, proposals: Proposals) -> None:
        """Note how long a round waited for its call, whose answer says what the service holds."""
        call_s = self._clock() - began_s
        self._doubtful.difference_update(row.sequence_id for row in rows)
        self._patience.called(call_s)
        self._worth.called(rows, call_s, proposals.timing)

    def _note(self, rows: Sequence[ProposeRow], proposals: Proposals, begun: Begun) -> None:
        """Note what a round got, to compare it with others."""
        results = proposals.results
        counts = [len(one.draft_token_ids) if isinstance(one, Proposal) else 0 for one in results]
        self._answered.answered(rows, counts)
        self._worth.answered(begun, sum(map(self._answered.tokens, counts)))
        self._patience.answered(rows, self._clock())

    def _known(self, rows: Sequence[ProposeRow], waited_s: float) -> Proposals | None:
        """Return what is known for the rows, if that is worth more than to wait.

        It says how much the service holds of them soon, which must be certain enough.
        """
        if not all(_is_taken_whole(row) and row.sequence_id not in self._doubtful for row in rows):
            return None
        drafts = [self._choices.drafts(row) for row in rows]
        if not self._patience.is_enough(rows, list(map(len, drafts)), waited_s):
            return None
        self.hit_count += sum(map(bool, drafts))
        return Proposals([_early(row, one) for row, one in zip(rows, drafts, strict=True)])

    def owe(self, sequence_ids: list[str]) -> None:
        self._choices.forget(sequence_ids)
        self._patience.forget(sequence_ids)
        self._answered.forget(sequence_ids)
        # A call that is still under way would cache tokens after the sequences were freed.
        names = set(sequence_ids)
        if busy := [task for task, own in self._background.items() if own & names]:
            occasion = object()
            self._ended |= dict.fromkeys(sequence_ids, occasion)
            kept_task(self._owe_after(busy, occasion), self._ending)
        else:
            self._owe(sequence_ids)

    async def _owe_after(self, busy: Sequence[asyncio.Task[None]], occasion: object) -> None:
        """Free what ended at an occasion and was not used again, once the calls are over."""
        await asyncio.wait(busy)
        ended = [sequence_id for sequence_id, own in self._ended.items() if own is occasion]
        for sequence_id in ended:
            del self._ended[sequence_id]
        self._owe(ended)

    def _owe(self, sequence_ids: list[str]) -> None:
        self._doubtful.difference_update(sequence_ids)
        self._drafter.owe(sequence_ids)

    async def release(self) -> int:
        if self._ending:
            await asyncio.wait(self._ending)
        return await self._drafter.release()

    async def _ask(self, rows: Sequence[ProposeRow], deadline: Deadline, began_s: float) -> Proposals:
        """Return the answer to the rows, or what is known of it, when that is enough before."""
        # A task, so that calls reach the drafter in their order.
        call = asyncio.create_task(self._drafter.propose(rows, deadline))
        arrival: asyncio.Task[object] | None = None
        try:
            while True:
                self._arrived.clear()
                arrival = asyncio.create_task(self._arrived.wait())
                await asyncio.wait((call, arrival), return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    proposals = call.result()
                    self._called(rows, began_s, proposals)
                    return proposals
                if known := self._known(rows, self._clock() - began_s):
                    self._go_on(rows, call, known)
                    return known
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            if arrival:
                arrival.cancel()

    async def _tell(self, rows: Sequence[ProposeRow]) -> Proposals:
        """Bring rows to the draft service that have their drafts already."""
        with self._traced():
            return await self._drafter.propose(rows, ANY_TIME)

    def _go_on(self, rows: Sequence[ProposeRow], call: asyncio.Task[Proposals], early: Proposals) -> None:
        """Let a call go on that no round waits for: the round had early proposals in place of its answer."""
        task = asyncio.create_task(self._outlast(rows, call, early))
        self._background[task] = frozenset(row.sequence_id for row in rows)
        task.add_done_callback(self._background.pop)

    async def _outlast(self, rows: Sequence[ProposeRow], call: asyncio.Task[Proposals], early: Proposals) -> None:
        """Wait for a call that nobody waits for. What it says of drafts may still help; what failed ends its drafts."""
        lost = {row.sequence_id for row in rows}
        try:
            results = (await call).results
            answers = [(row, result) for row, result in zip(rows, results, strict=True) if isinstance(result, Proposal)]
            self.take([_told(row, result) for row, result in answers if row.base_hash is not None])
            lost -= {
                row.sequence_id
                for row, result, said in zip(rows, results, early.results, strict=True)
                if _cached_length(result) >= _cached_length(said)
            }
        except PacelineError as error:
            log.debug("a draft service did not take what was prepared", error=str(error))
        except Exception:
            log.exception("a call in the background failed unexpectedly")
        self._choices.forget(lost)
        self._doubtful |= lost

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


def _is_taken_whole(row: ProposeRow) -> bool:
    """Return whether a service takes the row in one call: long prompts come in parts."""
    return not row.following_count and len(row.token_ids) <= DECODED_TOKENS


def _cached_length(result: Proposal | PacelineError) -> int:
    return result.cached_length if isinstance(result, Proposal) else 0


def _early(row: ProposeRow, drafts: tuple[int, ...]) -> Proposal:
    # So much is cached when the service has taken the row, before any later one.
    return Proposal(drafts, row.base_length + len(row.token_ids) + max(0, len(drafts) - 1), prepared=bool(drafts))


def _told(row: ProposeRow, proposal: Proposal) -> PreparedDrafts:
    """Return what a proposal says, as if it had come unasked."""
    assert row.base_hash is not None
    length, value = row.base_length + len(row.token_ids), extended_hash(row.base_hash, row.token_ids)
    return PreparedDrafts(row.sequence_id, length, value, proposal.draft_token_ids)
