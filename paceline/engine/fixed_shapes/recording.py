"""Recording of device work as a CUDA graph, to be replayed any number of times."""

from collections.abc import Callable

import structlog
import torch

log = structlog.get_logger()

Work = Callable[[], torch.Tensor]

WARM_UP_RUNS = 2
"""Runs before recording: libraries set themselves up in their first calls, which must not be recorded."""


def recorded(work: Work, device: torch.device) -> Work:
    """Return a function that repeats `work`: the replay of a CUDA graph, or `work` itself where none can be recorded.

    The work must read its inputs from memory that stays, must not wait for the device, and must be harmless to repeat.
    Its result lies in memory that the next replay overwrites.
    """
    if device.type != "cuda":
        return work
    try:
        return _graph(work)
    except RuntimeError as error:
        log.warning("a pass could not be recorded; it is launched kernel by kernel", error=str(error))
        return work


def _graph(work: Work) -> Work:
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_RUNS):
            work()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay
