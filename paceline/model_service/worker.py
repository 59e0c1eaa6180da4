"""The threads for all model work, so that the event loop and its health checks never wait for a pass.

One works at a time; there is another only where a pass waits for other ranks. Owns the threads, and the times of calls.
`call_queue` says what is done next, and `turns` which thread works.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import structlog
import torch

from paceline.engine.calls import Call
from paceline.engine.memory import is_out_of_memory
from paceline.errors import Overloaded, PacelineError, PeerUnavailable, as_result
from paceline.model_service.call_queue import ANY_CALLS, CallQueue, TurnBound
from paceline.model_service.turns import Turns
from paceline.observe.spans.request_spans import record_work
from paceline.scope import Caller, RowT
from paceline.types import CallTiming

log = structlog.get_logger()

NICENESS = 5
"""Added to the nice value of the model's thread."""

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Item:
    """A call or other work that waits or runs."""

    caller: Caller
    run: Callable[[Sequence["_Item"]], Sequence[Any]]
    """Returns a result for each of the items that are given: itself, or calls of one turn, which it is the first of."""
    future: asyncio.Future[tuple[Any, CallTiming]]
    call: Call[Any] | None = None
    token_count: int = 1
    asked_s: float = field(default_factory=time.perf_counter)
    others_s: float = 0.0
    """Time in which calls of other callers were served meanwhile."""
    counted_s: float = 0.0
    """Until when that is counted: turns may overlap."""

    @property
    def row_count(self) -> int:
        return len(self.call.rows) if self.call else 0

    @property
    def sequence_ids(self) -> frozenset[str]:
        return self.call.sequence_ids if self.call else frozenset()


class ModelWorker:
    """Does work one piece after another, and serves calls of several callers together."""

    def __init__(
        self,
        threads: int | None,
        on_call: Callable[[CallTiming], None] = lambda timing: None,
        niceness: int = NICENESS,
        *,
        lanes: int = 1,
        bound: TurnBound = ANY_CALLS,
        on_turn: Callable[[int], None] = lambda call_count: None,
    ) -> None:
        """`threads` limits the threads of one turn's operations; None leaves that to torch.

        `on_call` is called after every call that succeeded, and `on_turn`, in a model's thread, with the number of
        calls that were served together. `bound` limits these. `lanes` is how many turns may be under way, if all but
        one wait.
        """
        self.turns = Turns()
        self._on_call = on_call
        self._on_turn = on_turn
        self._try_device: Callable[[], None] = lambda: None
        self.device_lost = asyncio.Event()
        """Set when the device computes nothing any more in this process."""
        self._asked: set[asyncio.Future[tuple[Any, CallTiming]]] = set()
        """Of work that waits or runs."""
        self.call_count = 0
        """Calls that wait or run."""
        self._no_call = asyncio.Event()
        self._no_call.set()
        self._queue: CallQueue[_Item] = CallQueue(bound)
        self._worked_s = 0.0
        """Seconds of turns with calls."""
        self._lock = threading.Lock()
        """Held for `_queue` and `_worked_s`."""
        self._order = threading.Lock()
        """Held while a turn is taken out of the queue, so that turns begin in that order."""
        if lanes > 1 and threads is None:
            threads = torch.get_num_threads()  # a second thread would take over what the first has set for a moment
        self._executor = ThreadPoolExecutor(lanes, "model", initializer=partial(_begin, threads, niceness))

    def watch_device(self, try_device: Callable[[], None]) -> None:
        """Call `try_device` after each failed call. It computes something, and raises when the device is lost."""
        self._try_device = try_device

    async def run(self, work: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Result:
        """Run `work` in the thread. A caller that is cancelled while waiting takes its call out of the queue.

        Raise Overloaded when memory ran out, and PeerUnavailable, whatever `work` raised, when the device is lost:
        another replica may do the work.
        """
        return await self.run_for(Caller(), work, *args, **kwargs)

    async def run_for(self, caller: Caller, work: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Result:
        """Run `work` as `run` does, after what the caller asked for before."""
        result: Result
        result, _ = await self._counted(self._item(caller, partial(work, *args, **kwargs)))
        return result

    async def run_between(self, work: Callable[[], Result]) -> Result:
        """Run `work` as soon as no call waits or runs. Calls that come meanwhile wait for it, so it must be short."""
        while self.call_count:
            await self._no_call.wait()
        result: Result
        result, _ = await self._done(self._item(Caller(), work))
        return result

    async def run_timed(
        self, work: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Result, CallTiming]:
        """Run `work` as `run` does; also return how long it waited for others and how long it took."""
        return await self._timed(self._item(Caller(), partial(work, *args, **kwargs)))

    async def run_call(
        self, work: Callable[[Sequence[Call[RowT]]], Sequence[Result]], call: Call[RowT], token_count: int
    ) -> tuple[Result, CallTiming]:
        """Have `work` serve the call, beside calls of others that wait when its turn comes; return its result.

        `work` returns one result a call, and all calls that wait must be for the same work. It must be safe to repeat:
        when it fails for several calls, each is served alone, so that it fails for its own fault only. `token_count` is
        what the call has computed, at most.
        """
        future = asyncio.get_running_loop().create_future()
        run = partial(_serve, work)
        return await self._timed(_Item(call.caller, run, future, call, max(1, token_count)))

    def lose_device(self) -> None:
        """End all that waits or runs with PeerUnavailable: a thread may wait for ever for a device that is lost."""
        self.device_lost.set()
        for future in self._asked:
            if not future.done():
                future.set_exception(_lost())

    def close(self) -> None:
        """Wait for the running turn, unless the device is lost, and drop what waits."""
        self._executor.shutdown(wait=not self.device_lost.is_set(), cancel_futures=True)
        for item in self._queue.waiting():
            with suppress(RuntimeError):  # its event loop is closed
                item.future.get_loop().call_soon_threadsafe(item.future.cancel)

    @staticmethod
    def _item(caller: Caller, work: Callable[[], Any]) -> _Item:
        return _Item(caller, lambda items: [work()], asyncio.get_running_loop().create_future())

    async def _timed(self, item: _Item) -> tuple[Any, CallTiming]:
        asked_ns = time.time_ns()
        result, timing = await self._counted(item)
        record_work(asked_ns, timing)
        self._on_call(timing)
        return result, timing

    async def _counted(self, item: _Item) -> tuple[Any, CallTiming]:
        self.call_count += 1
        self._no_call.clear()
        try:
            return await self._done(item)
        finally:
            self.call_count -= 1
            if not self.call_count:
                self._no_call.set()

    async def _done(self, item: _Item) -> tuple[Any, CallTiming]:
        if self.device_lost.is_set():
            raise _lost()
        with self._lock:
            self._queue.add(item)
        self._executor.submit(self._turn)
        self._asked.add(item.future)
        try:
            return await item.future
        except asyncio.CancelledError:
            with self._lock:
                self._queue.remove(item)
            raise
        finally:
            self._asked.discard(item.future)

    def _turn(self) -> None:
        """Do what is next, in a model's thread. There are as many turns as items, and some find nothing to do."""
        with self._order:
            self.turns.wait_until_free()  # what comes until then may share the turn
            with self._lock:
                items = self._queue.take()
            if not items:
                return
            turn = self.turns.queued(_names(items))
        with self.turns.taken(turn):
            free_s, began_s = self.turns.free_since_s, time.perf_counter()
            outcomes = self._outcomes(items)
            timings = self._timings(items, free_s, began_s, time.perf_counter())
        with suppress(RuntimeError):  # the event loop is closed: nobody waits
            items[0].future.get_loop().call_soon_threadsafe(_settle, items, outcomes, timings)

    def _outcomes(self, items: Sequence[_Item]) -> Sequence[Any]:
        """Return each item's result or the error to raise. Only calls are served together."""
        if len(items) > 1 and not items[0].call:
            return [outcome for item in items for outcome in self._outcomes([item])]
        if items[0].call:
            self._on_turn(len(items))
        try:
            return self._run(items)
        except BaseException as error:
            if len(items) == 1:
                return [_Failure(as_result(error) if isinstance(error, PacelineError) else error)]
            return [outcome for item in items for outcome in self._outcomes([item])]

    def _timings(self, items: Sequence[_Item], free_s: float, began_s: float, ended_s: float) -> list[CallTiming]:
        """Return the items' times, and note on the calls that wait what was done for others.

        They could begin at `free_s`, and began once a thread had woken.
        """
        token_count = sum(item.token_count for item in items)
        shares = {item.caller.name: item.token_count / token_count for item in items}
        if items[0].call:
            with self._lock:
                self._worked_s += ended_s - began_s
                for item in self._queue.waiting():
                    waited_s = max(0.0, ended_s - max(began_s, item.asked_s, item.counted_s))
                    item.counted_s = ended_s
                    item.others_s += waited_s * (1 - shares.get(item.caller.name, 0.0))
        timings = [_timing(item, shares[item.caller.name], free_s, began_s, ended_s) for item in items]
        return [replace(timing, worked_s=self._worked_s) for timing in timings]

    def _run(self, items: Sequence[_Item]) -> Sequence[Any]:
        try:
            return items[0].run(items)
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
                # Said from here, because the caller may be gone.
                items[0].future.get_loop().call_soon_threadsafe(self.lose_device)
                raise _lost() from error
            raise


def _lost() -> PeerUnavailable:
    return PeerUnavailable("the device of this service is lost; the service ends")


@dataclass(frozen=True)
class _Failure:
    error: BaseException


def _names(items: Sequence[_Item]) -> frozenset[str] | None:
    """Return the sequences that calls are about; None for other work, which is done alone."""
    return frozenset().union(*(item.sequence_ids for item in items)) if items[0].call else None


def _serve(work: Callable[[Sequence[Call[Any]]], Sequence[Any]], items: Sequence[_Item]) -> Sequence[Any]:
    return work([item.call for item in items if item.call])


def _timing(item: _Item, share: float, free_s: float, began_s: float, ended_s: float) -> CallTiming:
    """Return the time of an item that had a share of a turn. That a thread had to wake first is no wait for others."""
    executed_s = (ended_s - began_s) * share
    others_s = item.others_s + (ended_s - began_s) * (1 - share)
    woken_s = max(0.0, began_s - max(item.asked_s, free_s))
    return CallTiming(ended_s - item.asked_s - woken_s - executed_s, executed_s, others_s)


def _settle(items: Sequence[_Item], outcomes: Sequence[Any], timings: Sequence[CallTiming]) -> None:
    for item, outcome, timing in zip(items, outcomes, timings, strict=True):
        if item.future.done():
            continue  # the caller is gone
        if isinstance(outcome, _Failure):
            item.future.set_exception(outcome.error)
        else:
            item.future.set_result((outcome, timing))


def niceness_on(device: str) -> int:
    """Return what is added to the nice value of a thread that works with a model on a device."""
    # A thread that feeds a GPU must not wait for a core.
    return 0 if device == "cuda" else NICENESS


def _begin(threads: int | None, niceness: int) -> None:
    if niceness and sys.platform == "linux":
        # On Linux a thread has a priority of its own. On busy cores, short work then comes before model work: calls
        # that come and go, of this service and of others. Raising a nice value needs no privilege.
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + niceness)
    if threads is not None:
        # OpenMP's count belongs to the calling thread, so it is set where the work is done.
        torch.set_num_threads(threads)
