"""Ranks as threads of one process, which send each other tensors through queues."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Lock, Thread
from typing import Any

import torch

from paceline.engine.following import Follower
from paceline.engine.loading import load_share
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.ranks.links import Awaited
from paceline.engine.ranks.messages import End
from paceline.types import RankGrid, RankPlace

LONGEST_S = 60


class Switchboard:
    """Queues between all pairs of ranks."""

    def __init__(self, grid: RankGrid) -> None:
        ranks = range(grid.rank_count)
        self.queues = {(source, target): Queue[torch.Tensor]() for source in ranks for target in ranks}


class QueueLinks:
    def __init__(self, place: RankPlace, switchboard: Switchboard) -> None:
        self._place = place
        self._queues = switchboard.queues

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._queues[self._place.rank, rank].put(tensor)

    def expect(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rank: int) -> Awaited:
        def awaited() -> torch.Tensor:
            found = self._queues[rank, self._place.rank].get(timeout=LONGEST_S)
            assert (found.shape, found.dtype) == (torch.Size(shape), dtype)
            return found.clone()

        return awaited

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        first = self._place.rank - self._place.share
        stage = range(first, first + self._place.grid.share_count)
        for rank in stage:
            self.send(tensor.clone(), rank)
        return [self.expect(tensor.shape, tensor.dtype, tensor.device, rank)() for rank in stage]

    def close(self) -> None:
        pass


@contextmanager
def loaded_on_ranks(
    model: Path, grid: RankGrid, options: EngineOptions, dtype: Any = "auto", quantization: Any = "none"
) -> Iterator[LoadedModel]:
    """Load a model on ranks that are threads; yield the first one's share. The others follow it."""
    switchboard = Switchboard(grid)
    failures: list[BaseException] = []
    reading = Lock()  # while transformers reads a model it changes torch's default dtype, for all threads

    def load(rank: int) -> LoadedModel:
        place = RankPlace(rank, grid)

        def meet(on_gpu: bool) -> QueueLinks:
            reading.release()
            return QueueLinks(place, switchboard)

        reading.acquire()
        return load_share(str(model), dtype, "cpu", quantization, place, meet)

    def follow(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            Follower(load(rank), options).run()
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, grid.rank_count)]
    for thread in threads:
        thread.start()
    loaded = load(0)
    assert loaded.group
    try:
        yield loaded
    finally:
        loaded.group.tell(End())
        for thread in threads:
            thread.join(LONGEST_S)
    assert not failures, failures
