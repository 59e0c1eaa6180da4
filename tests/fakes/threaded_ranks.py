"""Ranks as threads of one process, which send each other tensors through channels."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
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


class Channel:
    """What one rank sends another: the first to expect something gets what was sent first."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sent = deque[torch.Tensor]()
        self._expected = deque[Future[torch.Tensor]]()

    def send(self, tensor: torch.Tensor) -> None:
        with self._lock:
            if self._expected:
                self._expected.popleft().set_result(tensor)
            else:
                self._sent.append(tensor)

    def expect(self) -> Future[torch.Tensor]:
        found = Future[torch.Tensor]()
        with self._lock:
            if self._sent:
                found.set_result(self._sent.popleft())
            else:
                self._expected.append(found)
        return found


Channels = Mapping[tuple[int, int], Channel]
"""By the numbers of the sender and of the receiver."""


class ChannelLinks:
    def __init__(self, place: RankPlace, channels: Channels, gathering: Channels) -> None:
        """What is gathered goes through channels of its own, as through a process group of its own."""
        self._place = place
        self._channels = channels
        self._gathering = gathering

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._channels[self._place.rank, rank].send(tensor)

    def expect(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rank: int) -> Awaited:
        expected = self._channels[rank, self._place.rank].expect()

        def awaited() -> torch.Tensor:
            found = expected.result(LONGEST_S)
            assert (found.shape, found.dtype) == (torch.Size(shape), dtype)
            return found.clone()

        return awaited

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        first = self._place.rank - self._place.share
        stage = range(first, first + self._place.grid.share_count)
        for rank in stage:
            self._gathering[self._place.rank, rank].send(tensor.clone())
        return [self._gathering[rank, self._place.rank].expect().result(LONGEST_S).clone() for rank in stage]

    def meet(self) -> None:
        """Nothing waits shorter elsewhere."""

    def close(self) -> None:
        pass


def _met(until_met: ExitStack, links: ChannelLinks, on_gpu: bool) -> ChannelLinks:
    """Return the links of a rank that has read its model, and let the next one read."""
    until_met.close()
    return links


@contextmanager
def loaded_on_ranks(
    model: Path,
    grid: RankGrid,
    options: EngineOptions,
    dtype: Any = "auto",
    quantization: Any = "none",
    links: Callable[[RankPlace, Channels, Channels], ChannelLinks] = ChannelLinks,
    followers_threads: int = 1,
) -> Iterator[LoadedModel]:
    """Load a model on ranks that are threads; yield the first one's share. The others follow it."""
    ranks = range(grid.rank_count)
    channels, gathering = ({pair: Channel() for pair in product(ranks, ranks)} for _ in range(2))
    failures: list[BaseException] = []
    reading = Lock()  # while transformers reads a model it changes torch's default dtype, for all threads

    def load(rank: int) -> LoadedModel:
        place = RankPlace(rank, grid)
        with ExitStack() as until_met:
            until_met.enter_context(reading)
            meet = partial(_met, until_met, links(place, channels, gathering))
            return load_share(str(model), dtype, "cpu", quantization, options, place, meet)

    def follow(rank: int) -> None:
        torch.set_num_threads(followers_threads)
        try:
            Follower(load(rank), options).run()
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=follow, args=(rank,), daemon=True) for rank in ranks[1:]]
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
