"""The coordinator, as it is, with one metric more: the longest time that it held its event loop.

`holds` starts it. A timer of the loop looks at what its thread used of a processor since the last look, a millisecond
ago or as soon after that as the loop came to it. No callback took longer than the most it sees; those that follow each
other within that millisecond are added up.
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
        """Return the longest time between two looks since this was last asked, in seconds of processor time."""
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
