"""The choice between one thread and several for a piece of work, by its size alone.

Every operation waits for all its threads. After it they spin for milliseconds, on cores that another service may want;
then they fall asleep, and the next call must wake them.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_calls = threading.local()

SHARED_WORK = 25_000_000
"""Least multiply-adds of a layer for several threads: about 0.5 ms of one core."""
READING_TOKENS = 6
"""Tokens whose products with float32 weights take a core as long as reading the weights."""
SHARED_LOGITS = 100_000
"""Least logits of one sequence for several threads: 0.1 ms of one core without noise, 4 ms with noise."""


def pass_threads(layer_parameter_count: int, token_count: int) -> AbstractContextManager[object]:
    """Use one thread for torch's operations inside if a layer is little work, else as many as the caller may."""
    is_shared = layer_parameter_count * max(token_count, READING_TOKENS) >= SHARED_WORK
    return nullcontext() if is_shared else using_threads(1)


@contextmanager
def kernels_alone() -> Iterator[None]:
    """Leave all threads that the caller may use to the compiled kernels inside, which share out what is worth it.

    Torch's own threads would spin on the cores that the kernels' threads need: torch has one meanwhile.
    """
    outside: int | None = getattr(_calls, "kernel_threads", None)
    with using_threads(1) as allowed:
        _calls.kernel_threads = outside or allowed
        try:
            yield
        finally:
            _calls.kernel_threads = outside


def kernel_threads() -> int:
    """Return how many threads compiled kernels may use."""
    count: int = getattr(_calls, "kernel_threads", None) or torch.get_num_threads()
    return count


def choice_threads(logit_count: int) -> AbstractContextManager[object]:
    """Use one thread for the operations inside if they read few logits, else as many as the caller may."""
    return nullcontext() if logit_count >= SHARED_LOGITS else using_threads(1)


@contextmanager
def at_most(count: int | None) -> Iterator[None]:
    """Use at most `count` threads for the operations inside; None means as many as the caller may."""
    if count is None:
        yield
        return
    outside = most_threads()
    with using_threads(min(count, torch.get_num_threads())):
        _calls.most_threads = count
        try:
            yield
        finally:
            _calls.most_threads = outside


def most_threads() -> int | None:
    """Return what `at_most` was told, for those who work on the same from other processes; None for no limit."""
    count: int | None = getattr(_calls, "most_threads", None)
    return count


@contextmanager
def using_threads(count: int) -> Iterator[int]:
    """Use this many threads for torch's operations inside. Yields how many there were."""
    allowed = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield allowed
    finally:
        torch.set_num_threads(allowed)
