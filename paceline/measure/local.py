"""Systems that run in this process: peers with a plain function, in a thread of their own."""

from collections.abc import Sequence
from threading import Event
from typing import Protocol

from paceline.engine.worker import ModelWorker
from paceline.measure.system import Measured


class Peer(Protocol):
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
            # The thread cannot be cancelled; it can be asked to end.
            stop.set()
        return Measured(outputs, timing.executed_s)
