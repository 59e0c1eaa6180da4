"""Recording of device work as CUDA graphs, to be replayed any number of times."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import structlog
import torch

log = structlog.get_logger()

Made = TypeVar("Made")
Work: TypeAlias = Callable[[], Made]

WARM_UP_RUNS = 2
"""Runs before recording: libraries set themselves up in their first calls, which must not be recorded."""


class Recorder:
    """Records work on one device. All recordings share memory, so a result holds until the next replay of any."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def recorded(self, work: Work[Made]) -> Work[Made]:
        """Return a function that repeats `work`: the replay of a graph, or `work` itself where none can be recorded.

        The work must read its inputs from memory that stays, must not wait for the device, and must be harmless to
        repeat.
        """
        if self.device.type != "cuda":
            return work
        try:
            return self._graph(work)
        except RuntimeError as error:
            log.warning("a pass could not be recorded; it is launched kernel by kernel", error=str(error))
            return work

    def _graph(self, work: Work[Made]) -> Work[Made]:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                work()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()

        def replay() -> Made:
            graph.replay()
            return result

        return replay
