"""Recording of device work as CUDA graphs, to be replayed any number of times."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import structlog
import torch

from paceline.engine.memory import is_out_of_memory

log = structlog.get_logger()

Made = TypeVar("Made")
Work: TypeAlias = Callable[[], Made]

WARM_UP_RUNS = 2
"""Runs before recording: libraries set themselves up in their first calls, which must not be recorded."""


class Recorder:
    """Records work on one device. All recordings share memory, so a result holds until the next replay of any."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._can_record = device.type == "cuda"
        self._pool: Any = torch.cuda.graph_pool_handle() if self._can_record else None
        self.lacks_memory = False
        """Whether nothing more is recorded because memory ran out."""

    def recorded(self, work: Work[Made]) -> Work[Made]:
        """Return a function that repeats `work`: the replay of a graph, or `work` itself where none can be recorded.

        The work must read its inputs from memory that stays, must not wait for the device, and must be harmless to
        repeat. After one failure nothing more is recorded: the memory that recordings share may be left unusable.
        """
        if not self._can_record:
            return work
        try:
            return self._graph(work)
        except Exception as error:  # Triton's errors have no base that torch's have too
            self._can_record, self.lacks_memory = False, _lacked_memory(error)
            # A recording that was spoilt ends by an error of its own, so all that came before is told.
            log.warning(
                "passes cannot be recorded; they are launched kernel by kernel", error=str(error), exc_info=error
            )
            return work

    def _graph(self, work: Work[Made]) -> Work[Made]:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                work()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may ask for memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()

        def replay() -> Made:
            graph.replay()
            return result

        return replay


def _lacked_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out, also where the end of a recording that this spoilt raised an error of its own."""
    while error and not is_out_of_memory(error):
        error = error.__context__
    return error is not None
