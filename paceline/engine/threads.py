"""When work is worth more than one thread.

Every operation waits for all its threads, and between the calls of a service, while others have the cores, they go to
sleep. Before that they spin, for milliseconds, on a core that another service may want. Knows sizes only: neither
models nor who else wants the cores.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

SHARED_WORK = 25_000_000
"""Multiply-adds of a layer from which on its operations are shared out: about 0.5 ms of one core."""
READING_TOKENS = 6
"""To read float32 weights takes a core as long as to multiply them with this many tokens."""
SHARED_LOGITS = 100_000
"""Logits of one sequence from which on its choices are shared out: 0.1 ms of one core without noise, 4 ms with."""


def pass_threads(layer_parameter_count: int, token_count: int) -> AbstractContextManager[None]:
    """Use one thread for the operations inside where a layer is little work, else as many as the caller may."""
    is_shared = layer_parameter_count * max(token_count, READING_TOKENS) >= SHARED_WORK
    return nullcontext() if is_shared else using_threads(1)


def choice_threads(logit_count: int) -> AbstractContextManager[None]:
    """The same where all that is done is to read so many logits."""
    return nullcontext() if logit_count >= SHARED_LOGITS else using_threads(1)


def at_most(count: int | None) -> AbstractContextManager[None]:
    """Use no more than so many threads for the operations inside; None: as many as the caller may."""
    return nullcontext() if count is None else using_threads(min(count, torch.get_num_threads()))


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    allowed = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(allowed)
