"""A draft replica behind its circuit: it is asked as long as it answers, and soon enough to help.

Owns the rule of what counts as a failure:
- A call that fails is a failure; two in a row open the circuit. So do two wrong answers, which cannot be parsed or be
  true, unless many right ones come between.
- A call that times out opens the circuit at once, because another try would wait as long. The deadline is several times
  what the drafts are worth, so the draft service is stuck then; the work itself is not that long. If the group's own
  deadlines cut the call short, it counts only if it took several times that worth all the same.
- A call is late when it took longer than its drafts could save (`draft_worth`). Many late calls in a row open the
  circuit, and so does a late trial.

Rows that the service does not take in one call go in several, which are judged together.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil

import structlog

from coordinator.protocols import Deadline, RemoteDraft
from coordinator.replicas.circuit import Circuit, Failure
from coordinator.replicas.plausibility import check_proposals
from coordinator.replicas.replica import Replica
from coordinator.replicas.stickiness import SentBeginnings, SentTo
from paceline.errors import CallTimedOut, PacelineError, PeerUnavailable
from paceline.tasks import results_of
from paceline.types import CallTiming, CircuitState, Proposals, ProposeRow, ReplicaDescription

log = structlog.get_logger()

FIRST_TIMEOUT_S = 10.0
"""Deadline of calls while the worth of drafts is not known."""
LEAST_TIMEOUT_S = 3.0
TIMEOUT_WORTHS = 4
"""Deadline of a call as a multiple of the worth of its drafts."""
LATE_S = 0.05
"""A call faster than this is never late: noise would decide."""
LATE_TO_FAIL = 16


class GuardedDraft:
    def __init__(self, replica: Replica[RemoteDraft], circuit: Circuit, clock: Callable[[], float]) -> None:
        self.replica = replica
        self.sequence_ids: set[str] = set()
        """Sequences placed on the replica: it may hold some of them."""
        self._sent = SentTo()
        self._circuit = circuit
        self._clock = clock
        self._late_count = 0
        self._told_max_rows = 0
        """Most rows of a call that was told to be few; 0: none was."""

    @property
    def address(self) -> str:
        return self.replica.address

    @property
    def load(self) -> tuple[int, float]:
        """Count of its sequences, then the used share of its cache."""
        return len(self.sequence_ids), self.replica.kv_use

    @property
    def sent(self) -> SentBeginnings | None:
        return self._sent.beginnings(self.replica.description)

    @property
    def is_usable(self) -> bool:
        """Whether it may be asked now, be it for a trial."""
        return self.replica.is_up and self._circuit.would_allow

    @property
    def is_healthy(self) -> bool:
        """Whether its calls go well, as far as is known."""
        return self.replica.is_up and self._circuit.state is CircuitState.CLOSED

    @property
    def max_length(self) -> int:
        """Most tokens of a generation there; 0 while that is not known."""
        description = self.replica.description
        return description.longest_sequence if description else 0

    @property
    def prefill_chunk_tokens(self) -> int:
        """Prompt tokens computed in one call; 0 while that is not known."""
        description = self.replica.description
        return description.cache.prefill_chunk_tokens if description else 0

    @property
    def max_rows(self) -> int:
        """Most rows of a call; 0 while that is not known."""
        description = self.replica.description
        return description.max_rows if description else 0

    def describe(self) -> ReplicaDescription:
        return self.replica.described(len(self.sequence_ids), self._circuit.state)

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        if not self._circuit.allows():
            raise PeerUnavailable(f"the circuit to the draft at {self.replica.address} is open")
        timeout_s = _timeout_s(deadline.worth_s)
        is_cut_short = deadline.timeout_s is not None and deadline.timeout_s < timeout_s
        began = self._clock()
        try:
            proposals = await self._ask(rows, deadline if is_cut_short else Deadline(timeout_s))
            check_proposals(rows, proposals)
        except CallTimedOut as error:
            if is_cut_short and not _is_far_too_long(self._clock() - began, deadline.worth_s):
                self._circuit.gave_up()  # its requests had little time: nobody's fault
            else:
                self._circuit.failed(Failure.HUNG)
                self.replica.lose(error)
            raise
        except PacelineError as error:
            self._failed(error)
            raise
        except BaseException:
            self._circuit.gave_up()
            raise
        self._judge(self._clock() - began, deadline.worth_s)
        return proposals

    async def _ask(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        """Ask in one call, or side by side in as few as the service takes so many rows in."""
        remote, most = self.replica.remote, self.max_rows or len(rows)
        if len(rows) <= most:
            return await remote.propose(rows, deadline)
        self._tell_few(most, len(rows))
        size = ceil(len(rows) / ceil(len(rows) / most))
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        answers = await results_of([remote.propose(part, deadline) for part in parts])
        return Proposals([one for answer in answers for one in answer.results], timing_of_all(answers))

    def _tell_few(self, max_rows: int, row_count: int) -> None:
        """Tell once that the service takes fewer rows in a call than groups have, and again when it takes others."""
        if self._told_max_rows != max_rows:
            self._told_max_rows = max_rows
            log.warning(
                "a draft service takes fewer rows in a call than a group has, so it is asked in several; give it more "
                "--max-rows",
                address=self.address,
                max_rows=max_rows,
                rows=row_count,
            )

    def _failed(self, error: PacelineError) -> None:
        self._circuit.failed(Failure.of(error))
        if isinstance(error, PeerUnavailable):
            self.replica.lose(error)
        else:
            circuit = self._circuit.state.value
            log.warning("a draft failed", address=self.replica.address, error=str(error), circuit=circuit)

    def _judge(self, elapsed_s: float, worth_s: float | None) -> None:
        is_late = worth_s is not None and elapsed_s > max(worth_s, LATE_S)
        self._late_count = self._late_count + 1 if is_late else 0
        if is_late and (self._circuit.state is CircuitState.HALF_OPEN or self._late_count >= LATE_TO_FAIL):
            self._late_count = 0
            self._circuit.failed(Failure.LATE)
            log.warning(
                "a draft is slower than it helps", address=self.replica.address, took_s=elapsed_s, worth_s=worth_s
            )
        else:
            self._circuit.succeeded()


def timing_of_all(answers: Iterable[Proposals]) -> CallTiming:
    """Return the times of the call that ended last of those that were made side by side."""
    timings = (answer.timing for answer in answers)
    return max(timings, key=lambda timing: timing.queued_s + timing.executed_s, default=CallTiming())


def _timeout_s(worth_s: float | None) -> float:
    return FIRST_TIMEOUT_S if worth_s is None else max(LEAST_TIMEOUT_S, TIMEOUT_WORTHS * worth_s)


def _is_far_too_long(elapsed_s: float, worth_s: float | None) -> bool:
    """Return whether a call without an answer is the draft's fault, though its requests would have waited no longer.

    To be wrong costs drafts for a moment. To wait for longer would cost the next requests all of their time.
    """
    return elapsed_s > TIMEOUT_WORTHS * max(worth_s or 0.0, LATE_S)
