"""Measured systems that run in this process: peers, in a thread of their own."""

from collections import defaultdict
from collections.abc import Sequence
from threading import Event
from typing import Protocol

from paceline.measure.alternate import undisturbed
from paceline.measure.contention import Watch, counting
from paceline.measure.system import Measured
from paceline.model_service.worker import ModelWorker
from paceline.process.cluster_plan import CORES

THREADS_TRIED = sorted({1, max(1, CORES // 2), CORES})
TRIALS = 3
"""Trials of each number of threads. The shortest counts, because the first warms up."""


class Peer(Protocol):
    threads: int
    """Number of threads that it uses from its next answer on."""

    def answer(self, prompts: Sequence[Sequence[int]], stop: Event) -> list[list[int]]: ...


class LocalSystem:
    def __init__(self, worker: ModelWorker, peer: Peer) -> None:
        self._worker = worker
        self._peer = peer

    async def run(self, prompts: Sequence[tuple[int, ...]]) -> Measured:
        stop = Event()
        try:
            outputs, timing = await self._worker.run_timed(self._peer.answer, prompts, stop)
        finally:
            # The thread cannot be cancelled, but it can be asked to end.
            stop.set()
        return Measured(outputs, timing.executed_s)

    async def take_fastest_threads(self, prompts: Sequence[tuple[int, ...]], watch: Watch) -> int:
        """Give the peer the number of threads with which it answers these prompts fastest; return that number.

        Disturbed passes are repeated, because otherwise a peer that waits by spinning would get one thread for good.
        """
        tried: dict[int, list[Measured]] = defaultdict(list)
        for threads in THREADS_TRIED * TRIALS:
            self._peer.threads = threads
            tried[threads].append(await undisturbed(self, prompts, watch))
        took_s = {threads: min(one.elapsed_s for one in counting(trials)) for threads, trials in tried.items()}
        self._peer.threads = min(took_s, key=took_s.__getitem__)
        return self._peer.threads
