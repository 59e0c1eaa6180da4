"""When a pass is worth more than one thread.

Every operation of a pass waits for all its threads, and between the passes of a service, while others have the cores,
they go to sleep. Knows sizes only: neither models nor who else wants the cores.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SHARED_WORK = 25_000_000
"""Multiply-adds of a layer from which on its operations are shared out: about 0.5 ms of one core."""
READING_TOKENS = 6
"""To read float32 weights takes a core as long as to multiply them with this many tokens."""


@contextmanager
def fitting_threads(layer_parameter_count: int, token_count: int) -> Iterator[None]:
    """Use one thread for the operations inside where a layer is little work, else as many as the caller may."""
    allowed = torch.get_num_threads()
    if allowed == 1 or layer_parameter_count * max(token_count, READING_TOKENS) >= SHARED_WORK:
        yield
        return
    with using_threads(1):
        yield


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    allowed = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(allowed)
