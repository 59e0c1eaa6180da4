"""Threads that read, tokenize and check requests, so that neither rounds nor other calls wait for that.

Long requests have threads of their own, so that a few of them do not keep others from being admitted. Knows nothing of
a request but its length.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from threading import Lock
from typing import Any, TypeVar

from paceline.errors import Overloaded, PacelineError

LONG_BYTES = 64 << 10
"""Requests above this are long: tokenizing this much takes some 50 ms."""
MAX_WAITING_BYTES = 64 << 20
"""Bytes in work and waiting for a thread; short and long requests have this limit each."""

T = TypeVar("T")


class AdmissionThreads:
    def __init__(self, thread_count: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        """Make `thread_count` threads for short requests, and as many for long ones."""
        self._short = _Threads("admission", thread_count, max_waiting_bytes)
        self._long = _Threads("admission of long requests", thread_count, max_waiting_bytes)

    async def run(self, admit: Callable[[], T], byte_count: int) -> T:
        """Call `admit` in a thread, in the caller's context. Raise Overloaded when too many bytes wait already."""
        threads = self._short if byte_count <= LONG_BYTES else self._long
        context = copy_context()
        return await asyncio.wrap_future(threads.submit(lambda: context.run(_run, admit), byte_count))

    def close(self) -> None:
        for threads in (self._short, self._long):
            threads.close()


@asynccontextmanager
async def admission_threads() -> AsyncIterator[AdmissionThreads]:
    """Yield admission threads for half of the cores, 1 to 4; close them on leaving."""
    threads = AdmissionThreads(min(4, max(1, (os.cpu_count() or 1) // 2)))
    try:
        yield threads
    finally:
        threads.close()


class _Threads:
    def __init__(self, name: str, thread_count: int, max_bytes: int) -> None:
        self._executor = ThreadPoolExecutor(thread_count, thread_name_prefix=name)
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = Lock()

    def submit(self, work: Callable[[], T], byte_count: int) -> "Future[T]":
        with self._lock:
            # A request alone is always taken: other checks limit its length.
            if self._bytes and self._bytes + byte_count > self._max_bytes:
                raise Overloaded(
                    f"requests of {self._bytes} bytes are being read already, and {self._max_bytes} may be; "
                    f"try this one, of {byte_count} bytes, again later"
                )
            self._bytes += byte_count
        left = [work]
        future = self._executor.submit(lambda: left.pop()())

        def ended(_: "Future[Any]") -> None:
            left.clear()  # cancelled work stays in the executor's queue until a thread reaches it
            with self._lock:
                self._bytes -= byte_count

        future.add_done_callback(ended)
        return future

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _run(admit: Callable[[], T]) -> T:
    try:
        return admit()
    except PacelineError as error:
        # The traceback holds the request, which is to be freed in this thread and not in the event loop.
        refusal = error.with_traceback(None)
    raise refusal
