"""The threads for all model work, so that the event loop and its health checks never wait for a pass.

One works at a time; there is another only where a pass waits for other ranks. `turns` says which.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import structlog
import torch

from paceline.engine.memory import is_out_of_memory
from paceline.errors import Overloaded, PacelineError, PeerUnavailable
from paceline.model_service.turns import Turns
from paceline.observe.spans.request_spans import record_work
from paceline.types import CallTiming

log = structlog.get_logger()

NICENESS = 5
"""Added to the nice value of the model's thread."""

P = ParamSpec("P")
Result = TypeVar("Result")


class ModelWorker:
    """Runs calls one after another, in the order they came."""

    def __init__(
        self,
        threads: int | None,
        on_call: Callable[[CallTiming], None] = lambda timing: None,
        niceness: int = NICENESS,
        lanes: int = 1,
    ) -> None:
        """`threads` limits the threads of one call's operations; None leaves that to torch.

        `on_call` is called after every timed call that succeeded. `lanes` is how many calls may be under way, if all
        but one wait.
        """
        self.turns = Turns()
        self._on_call = on_call
        self._try_device: Callable[[], None] = lambda: None
        self.device_lost = asyncio.Event()
        """Set when a call has failed because the device computes nothing any more in this process."""
        self._call_count = 0
        """Calls that wait or run."""
        self._no_call = asyncio.Event()
        self._no_call.set()
        self._executor = ThreadPoolExecutor(lanes, "model", initializer=partial(_begin, threads, niceness))

    def watch_device(self, try_device: Callable[[], None]) -> None:
        """Call `try_device` after each failed call. It computes something, and raises when the device is lost."""
        self._try_device = try_device

    async def run(self, work: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Result:
        """Run `work` in the thread. A caller that is cancelled while waiting takes its call out of the queue.

        Raise Overloaded when memory ran out, and PeerUnavailable, whatever `work` raised, when the device is lost:
        another replica may do the work.
        """
        return await self._counted(partial(work, *args, **kwargs))

    async def _counted(self, work: Callable[[], Result], names: frozenset[str] | None = None) -> Result:
        self._call_count += 1
        self._no_call.clear()
        try:
            return await self._submitted(work, names)
        finally:
            self._call_count -= 1
            if not self._call_count:
                self._no_call.set()

    async def run_between(self, work: Callable[[], Result]) -> Result:
        """Run `work` as soon as no call waits or runs. Calls that come meanwhile wait for it, so it must be short."""
        while self._call_count:
            await self._no_call.wait()
        return await self._submitted(work)

    async def _submitted(self, work: Callable[[], Result], names: frozenset[str] | None = None) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._run, work, names, loop)

    async def run_timed(
        self, work: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Result, CallTiming]:
        """Run `work` as `run` does; also return how long the call waited for others and how long it took."""
        return await self._timed(partial(work, *args, **kwargs))

    async def run_about(
        self, names: frozenset[str], work: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Result, CallTiming]:
        """Run `work` about sequences as `run_timed` does, perhaps while calls about others wait."""
        return await self._timed(partial(work, *args, **kwargs), names)

    async def _timed(
        self, work: Callable[[], Result], names: frozenset[str] | None = None
    ) -> tuple[Result, CallTiming]:
        asked, asked_ns = time.perf_counter(), time.time_ns()

        def timed() -> tuple[Result, CallTiming]:
            began = time.perf_counter()
            result = work()
            return result, CallTiming(began - asked, time.perf_counter() - began)

        result, timing = await self._counted(timed, names)
        record_work(asked_ns, timing)
        self._on_call(timing)
        return result, timing

    def close(self) -> None:
        """Wait for the running call, drop the waiting ones."""
        self._executor.shutdown(cancel_futures=True)

    def _run(self, work: Callable[[], Result], names: frozenset[str] | None, loop: asyncio.AbstractEventLoop) -> Result:
        try:
            with self.turns.taken(names):
                return work()
        except PacelineError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise Overloaded("no memory is left for the work of this call") from error
            # Either the call is at fault, or the device: CUDA fails every later call after some errors.
            try:
                self._try_device()
            except Exception:
                log.error("the device is lost", exc_info=error)
                # Set it from here, because the caller may be gone.
                loop.call_soon_threadsafe(self.device_lost.set)
                raise PeerUnavailable("the device of this service is lost; the service ends") from error
            raise


def _begin(threads: int | None, niceness: int) -> None:
    if niceness and sys.platform == "linux":
        # On Linux a thread has a priority of its own. On busy cores, short work then comes before model work: calls
        # that come and go, of this service and of others. Raising a nice value needs no privilege.
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + niceness)
    if threads is not None:
        # OpenMP's count belongs to the calling thread, so it is set where the work is done.
        torch.set_num_threads(threads)
