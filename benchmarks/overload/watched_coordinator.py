"""The unchanged coordinator with one more metric: the longest hold of its event loop.

`holds` starts it. Every millisecond, or as soon after as the loop is free, a timer reads the processor time that the
loop's thread used since the last reading. No callback took longer than the largest of these; one may cover several.
"""

import asyncio
import time

from prometheus_client import Gauge

from coordinator.config import CoordinatorSettings
from coordinator.serving import running_coordinator
from paceline.process.instruments import instruments
from paceline.process.service import announce, freeze_heap, run_service
from paceline.process.settings import parse_settings
from paceline.wire import termination

MODULE = "benchmarks.overload.watched_coordinator"
INTERVAL_S = 0.001
METRIC = "benchmark_longest_hold_seconds"


class LoopWatch:
    def __init__(self) -> None:
        self._longest_s = 0.0
        self._looked_s = time.thread_time()

    def look(self) -> None:
        now_s = time.thread_time()
        self._longest_s = max(self._longest_s, now_s - self._looked_s)
        self._looked_s = now_s
        asyncio.get_running_loop().call_later(INTERVAL_S, self.look)

    def take(self) -> float:
        """Return the longest time between two looks since the last call, in seconds of processor time."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


async def serve(settings: CoordinatorSettings) -> None:
    with instruments("coordinator", settings) as watched:
        async with running_coordinator(settings, watched) as server:
            freeze_heap()
            watch = LoopWatch()
            longest = Gauge(METRIC, "Longest hold of the event loop since the last scrape.", registry=watched.registry)
            longest.set_function(watch.take)
            watch.look()
            announce(MODULE, server.address, watched.metrics_url)
            await termination(stop_with_stdin=settings.stop_with_stdin)


if __name__ == "__main__":
    settings = parse_settings(CoordinatorSettings, "coordinator")
    run_service("coordinator", settings, serve(settings))
