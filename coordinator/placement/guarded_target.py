"""A target replica behind its circuit: it is given up when its calls fail although its health check succeeds.

Owns the rule of what counts as a failure:
- A call that fails as a whole is a failure; `FAILURES_TO_OPEN` in a row open the circuit. A single row that breaks
  every group it is in does not open it: between its failures other calls succeed.
- So do as many wrong answers, which cannot be parsed or be true, unless many right ones come between.
- A call that times out opens the circuit at once, because another try would wait as long. If the group's own deadlines
  cut the call short, it counts only if calls of that size, to any target, take far less.
- A target that answers no checks while it owes an answer has timed out too: its network may lose large messages alone.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from coordinator.protocols import Verifier
from coordinator.replicas.circuit import Circuit, Failure
from coordinator.replicas.plausibility import check_rollbacks, check_verdicts
from paceline.errors import CallTimedOut, PacelineError
from paceline.types import CircuitState, RolledBack, SequenceLength, Verdicts, VerifyRow

FAILURES_TO_OPEN = 3
LONG_CALLS = 4
"""A call without an answer is far too long after this many times the expected seconds."""
LEAST_LONG_S = 0.25
FIRST_LONG_S = 2.0
"""Seconds that are far too long before any call was measured."""
TIMEOUT_SLACK_S = 0.05
"""A call that ended this near to its group's deadlines was cut short by them."""
DECAY = 0.98
"""Factor on the longest call with each later one."""


class UsualTime:
    """Usual times of calls to all targets together: a target that never answered is judged by the others."""

    def __init__(self) -> None:
        self._longest_s: dict[int, float] = {}
        """Longest recent call in seconds, by the bit length of its token count."""

    def add(self, token_count: int, elapsed_s: float) -> None:
        size = token_count.bit_length()
        self._longest_s[size] = max(elapsed_s, DECAY * self._longest_s.get(size, 0.0))

    def is_far_exceeded(self, token_count: int, elapsed_s: float) -> bool:
        return elapsed_s > max(LEAST_LONG_S, LONG_CALLS * self._expected_s(token_count))

    def _expected_s(self, token_count: int) -> float:
        """Return the longest call of this or the next larger size or, if more, of the next smaller one, scaled up."""
        size, known = token_count.bit_length(), sorted(self._longest_s)
        place = bisect_left(known, size)
        nearest = known[max(0, place - 1) : place + 1]
        expected_s = (self._longest_s[one] * 2 ** max(0, size - one) for one in nearest)
        return max(expected_s, default=FIRST_LONG_S / LONG_CALLS)


class GuardedTarget:
    def __init__(
        self,
        remote: Verifier,
        vocabulary_size: int,
        usual: UsualTime,
        circuit: Circuit,
        clock: Callable[[], float],
    ) -> None:
        """`vocabulary_size` is the target's: an answer with a token beyond it cannot be true."""
        self.circuit = circuit
        self._remote = remote
        self._vocabulary_size = vocabulary_size
        self._usual = usual
        self._clock = clock
        self._under_way_count = 0

    @property
    def is_given_up(self) -> bool:
        return self.circuit.state is CircuitState.OPEN

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        """Ask the target. Raise the call's error, or WrongAnswer when its answer cannot be true."""
        began_s, token_count = self._clock(), sum(len(row.token_ids) + len(row.draft_token_ids) for row in rows)
        self._under_way_count += 1
        try:
            verdicts = await self._remote.verify(rows, timeout_s)
            check_verdicts(rows, verdicts, self._vocabulary_size)
        except CallTimedOut:
            elapsed_s = self._clock() - began_s
            is_cut_short = timeout_s is not None and elapsed_s > timeout_s - TIMEOUT_SLACK_S
            if is_cut_short and not self._usual.is_far_exceeded(token_count, elapsed_s):
                self.circuit.gave_up()  # its requests had little time: nobody's fault
            else:
                self.circuit.failed(Failure.HUNG)
            raise
        except PacelineError as error:
            self.circuit.failed(Failure.of(error))
            raise
        except BaseException:
            self.circuit.gave_up()
            raise
        finally:
            self._under_way_count -= 1
        self._usual.add(token_count, self._clock() - began_s)
        self.circuit.succeeded()
        return verdicts

    def lost(self) -> None:
        """Note that it answers no checks any more. Where it owes an answer too, it may hang again for the next rows."""
        if self._under_way_count:
            self.circuit.failed(Failure.HUNG)

    def tried(self) -> None:
        """Note the end of a round. If it was the trial but made no call, the next round is the trial."""
        self.circuit.gave_up()

    def owe(self, sequence_ids: list[str]) -> None:
        self._remote.owe(sequence_ids)

    async def release(self) -> int:
        return await self._remote.release()

    async def rollback(self, lengths: Sequence[SequenceLength]) -> list[RolledBack | PacelineError]:
        """Cut sequences. Raise the call's error, or WrongAnswer when its answer cannot be true."""
        results = await self._remote.rollback(lengths)
        check_rollbacks(lengths, results)
        return results
