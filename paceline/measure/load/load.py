"""Load: requests are sent at their planned times, or by clients in a loop, and the outcome of each is recorded.

At planned times a slow server does not slow the arrivals. Latency counts from the planned arrival, so it includes all
waiting that the server caused. This module knows nothing of rates, reports or the command line.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from paceline.errors import Overloaded, PacelineError
from paceline.types import GenerationRequest, OutputPiece, Usage

Generate = Callable[[GenerationRequest], AsyncIterator[OutputPiece]]
Sleep = Callable[[float], Awaitable[None]]


class Outcome(Enum):
    COMPLETED = "completed"
    REJECTED = "rejected"
    """The server had no room."""
    FAILED = "failed"
    UNFINISHED = "unfinished"
    """The run was interrupted first."""


@dataclass(frozen=True)
class SentRequest:
    """One request. Times are seconds since the start of the run."""

    planned_s: float
    sent_s: float
    ended_s: float
    outcome: Outcome
    token_times: tuple[tuple[float, int], ...] = ()
    """Time and number of tokens of each piece of output."""
    usage: Usage | None = None
    """Usage of a completed request; None otherwise."""
    error: str = ""
    """Reason of the failure, by the names of `paceline.errors`; empty without a failure."""
    message: str = ""
    """What the failure says for people."""

    @property
    def output_count(self) -> int:
        return sum(count for _, count in self.token_times)

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token; None without output."""
        return self.token_times[0][0] - self.planned_s if self.token_times else None

    @property
    def per_token_s(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two tokens."""
        if self.output_count < 2:
            return None
        return (self.token_times[-1][0] - self.token_times[0][0]) / (self.output_count - 1)

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.planned_s


@dataclass
class LoadLog:
    """The log of a run, which grows during the run and survives an interruption."""

    clock: Callable[[], float] = time.perf_counter
    began_s: float = 0.0
    sent_count: int = 0
    records: list[SentRequest] = field(default_factory=list)
    token_times: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of tokens of each piece, of all requests, those in flight included."""

    def elapsed_s(self) -> float:
        return self.clock() - self.began_s

    @property
    def in_flight_count(self) -> int:
        return self.sent_count - len(self.records)

    def count(self, outcome: Outcome) -> int:
        return sum(record.outcome is outcome for record in self.records)


async def run_load(
    arrivals: Iterable[tuple[float, GenerationRequest]],
    generate: Generate,
    log: LoadLog,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Send each request at its time and wait for the last to end. After a cancellation `log` has what was measured."""
    log.began_s = log.clock()
    async with asyncio.TaskGroup() as requests:
        for planned_s, request in arrivals:
            if (wait_s := planned_s - log.elapsed_s()) > 0:
                await sleep(wait_s)
            log.sent_count += 1
            requests.create_task(_send(planned_s, request, generate, log))


async def run_loops(requests: Sequence[GenerationRequest], client_count: int, generate: Generate, log: LoadLog) -> None:
    """Send the requests by so many clients, each of which asks again when it was answered; wait for the last to end."""
    log.began_s, left = log.clock(), iter(requests)

    async def ask() -> None:
        for request in left:
            log.sent_count += 1
            await _send(log.elapsed_s(), request, generate, log)

    async with asyncio.TaskGroup() as clients:
        for _ in range(client_count):
            clients.create_task(ask())


async def _send(planned_s: float, request: GenerationRequest, generate: Generate, log: LoadLog) -> None:
    sent_s = log.elapsed_s()
    token_times: list[tuple[float, int]] = []
    outcome, usage, error, message = Outcome.UNFINISHED, None, "", ""
    try:
        async for piece in generate(request):
            if piece.tokens:
                token_times.append((log.elapsed_s(), len(piece.tokens)))
                log.token_times.append(token_times[-1])
            if piece.finish:
                outcome, usage = Outcome.COMPLETED, piece.finish.usage
        if usage is None:
            outcome, error, message = Outcome.FAILED, "NO_FINISH", "the stream ended without a finish"
    except Overloaded as failure:
        outcome, error, message = Outcome.REJECTED, failure.reason, failure.message
    except PacelineError as failure:
        outcome, error, message = Outcome.FAILED, failure.reason, failure.message
    finally:
        times = (planned_s, sent_s, log.elapsed_s())
        log.records.append(SentRequest(*times, outcome, tuple(token_times), usage, error, message))
