"""When work is worth more than one thread.

Every operation waits for all its threads, and between the calls of a service, while others have the cores, they go to
sleep. Before that they spin, for milliseconds, on a core that another service may want. Knows sizes only: neither
models nor who else wants the cores.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SHARED_WORK = 25_000_000
"""Multiply-adds of a layer from which on its operations are shared out: about 0.5 ms of one core."""
READING_TOKENS = 6
"""To read float32 weights takes a core as long as to multiply them with this many tokens."""
SHARED_LOGITS = 100_000
"""Logits of one sequence from which on its choices are shared out: 0.1 ms of one core without noise, 4 ms with."""


@contextmanager
def pass_threads(layer_parameter_count: int, token_count: int) -> Iterator[None]:
    """Use one thread for the operations inside where a layer is little work, else as many as the caller may."""
    with _fitting(layer_parameter_count * max(token_count, READING_TOKENS) >= SHARED_WORK):
        yield


@contextmanager
def choice_threads(logit_count: int) -> Iterator[None]:
    """The same where all that is done is to read so many logits."""
    with _fitting(logit_count >= SHARED_LOGITS):
        yield


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    allowed = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(allowed)


@contextmanager
def _fitting(is_shared: bool) -> Iterator[None]:
    if is_shared or torch.get_num_threads() == 1:
        yield
        return
    with using_threads(1):
        yield
