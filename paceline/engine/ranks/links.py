"""Links: tensors that ranks send each other. What the tensors mean is not known here.

`TorchLinks` are torch.distributed: gloo carries tensors of the host, NCCL those of GPUs.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol

import torch
from torch import distributed

from paceline.errors import StartupError
from paceline.types import RankPlace

MEETING_S = 1800.0
"""Seconds until all ranks must have read their weights, and again until they must have made their parts of them."""
LOOK_S = 0.05
KEPT_SENDINGS = 8
"""Messages to a rank that may be under way. Two passes are at most, each with a plan and what a stage passes on."""

Awaited = Callable[[], torch.Tensor]
"""Waits for a tensor that is under way, and returns it."""


class Links(Protocol):
    """What two ranks send each other comes in order. Any failure leaves the ranks at different places for good."""

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor, which nobody may change any more, without waiting until it is taken."""
        ...

    def expect(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rank: int) -> Awaited:
        """Begin to receive what a rank sends next."""
        ...

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return what each rank of this stage gave, in the order of the ranks."""
        ...

    def meet(self) -> None:
        """Wait until all ranks are here, which may take minutes more in one than in another."""
        ...

    def close(self) -> None: ...


class TorchLinks:
    def __init__(self, place: RankPlace, timeout_s: float, *, on_gpu: bool, is_given_up: Callable[[], bool]) -> None:
        """Meet the other ranks. Afterwards a rank that does not answer for `timeout_s` fails the call that waits.

        Raise StartupError when they do not come, or when `is_given_up` says that they will not.
        """
        grid = place.grid
        # NCCL's watchdog ends a process whose pass waits for a rank that is gone, by default a minute later: time in
        # which records that nobody keeps would be written.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        store = _meet(place, is_given_up)
        timeout = timedelta(seconds=timeout_s)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=place.rank,
            world_size=grid.rank_count,
            timeout=timeout,
        )
        firsts = range(0, grid.rank_count, grid.share_count)
        stages = [distributed.new_group([*range(one, one + grid.share_count)], timeout=timeout) for one in firsts]
        self._stage, self._share_count = stages[place.stage], grid.share_count
        # NCCL does what a pair exchanges within a group one after the other: results must not hold up the next pass.
        self._back = distributed.new_group(timeout=timeout)
        self._patient = distributed.new_group(timeout=timedelta(seconds=MEETING_S), backend="gloo")
        self._rank = place.rank
        self._sendings: dict[int, deque[tuple[Any, torch.Tensor]]] = {}

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        under_way = self._sendings.setdefault(rank, deque())
        if len(under_way) == KEPT_SENDINGS:
            under_way.popleft()[0].wait()
        # The tensor is kept until it was taken.
        under_way.append((distributed.isend(tensor, rank, self._group(self._rank, rank)), tensor))

    def expect(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rank: int) -> Awaited:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        work: Any = distributed.irecv(tensor, rank, self._group(rank, self._rank))

        def awaited() -> torch.Tensor:
            work.wait()
            return tensor

        return awaited

    def _group(self, sender: int, receiver: int) -> Any:
        """Return the group of what goes to higher ranks, None for the one of all, or to lower ones."""
        return None if sender < receiver else self._back

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self._share_count)]
        distributed.all_gather(gathered, tensor, group=self._stage)
        return gathered

    def meet(self) -> None:
        distributed.barrier(self._patient)

    def close(self) -> None:
        with suppress(RuntimeError):  # a rank that is gone
            for work, _ in chain.from_iterable(self._sendings.values()):
                work.wait()
            distributed.destroy_process_group()


def _meet(place: RankPlace, is_given_up: Callable[[], bool]) -> Any:
    """Return the store of all ranks once all are there."""
    count, longest = place.grid.rank_count, timedelta(seconds=MEETING_S)
    try:
        store, *_ = next(distributed.rendezvous(place.meeting, place.rank, count, timeout=longest))  # type: ignore[attr-defined]
    except (OSError, RuntimeError, ValueError) as error:
        raise StartupError(
            f"rank {place.rank} of {count} cannot reach the others at {place.meeting}: {error}"
        ) from error
    store.set(f"loaded/{place.rank}", "yes")
    deadline = time.monotonic() + MEETING_S
    while not store.check([f"loaded/{rank}" for rank in range(count)]):
        if is_given_up():
            raise StartupError("another rank of this model ended before it had loaded its part; see above")
        if time.monotonic() > deadline:
            raise StartupError(
                f"not all of {count} ranks loaded their parts within {MEETING_S:.0f} s; start all of them"
            )
        time.sleep(LOOK_S)
    return distributed.PrefixStore("paceline", store)  # type: ignore[attr-defined]
