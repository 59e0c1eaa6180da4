"""A model service over several ranks: the first one serves, the others follow it, and all end together."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from typing import NoReturn

import structlog

from paceline.engine.following import Follower
from paceline.engine.loading import load_model, load_share
from paceline.engine.model.loader import resolve_device
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.ranks.group import Group
from paceline.engine.ranks.links import TorchLinks
from paceline.engine.ranks.messages import End
from paceline.errors import PeerUnavailable, StartupError
from paceline.model_service.worker import ModelWorker, niceness_on
from paceline.process.ranks import Ranks
from paceline.process.settings import ModelServiceSettings
from paceline.wire import ends_with_stdin

log = structlog.get_logger()

BEATS = 4
"""How often in `rank_timeout_s` the first rank shows that it lives, and asks the others whether they do."""


Load = Callable[..., LoadedModel]


def share_loader(settings: ModelServiceSettings, options: EngineOptions, ranks: Ranks, otherwise: Load) -> Load:
    """Return what loads this rank's share of a model; `otherwise` for a model that is on one rank."""
    if ranks.place.grid.rank_count == 1:
        return otherwise

    def meet(on_gpu: bool) -> TorchLinks:
        return TorchLinks(ranks.place, settings.rank_timeout_s, on_gpu=on_gpu, is_given_up=lambda: ranks.is_broken)

    return partial(load_share, options=options, place=ranks.place, meet=meet)


@contextmanager
def loading_together(ranks: Ranks) -> Iterator[None]:
    """Raise StartupError when another rank ends while the block loads a share."""
    try:
        yield
    except RuntimeError as error:
        if ranks.place.grid.rank_count == 1:
            raise
        raise StartupError(f"another rank of this model ended, or did not answer; see above: {error}") from error


async def follow(settings: ModelServiceSettings, options: EngineOptions, ranks: Ranks) -> None:
    """Load this rank's share and follow the first rank until it ends the group. Raise PeerUnavailable if it is lost."""
    if settings.stop_with_stdin:
        ends_with_stdin(partial(_end_without_first, ranks))
    place, load = ranks.place, share_loader(settings, options, ranks, load_model)
    niceness = niceness_on(resolve_device(settings.device))
    with closing(ModelWorker(ranks.threads(settings.threads), niceness=niceness)) as worker:
        with loading_together(ranks):
            model = await worker.run(load, settings.model, settings.dtype, settings.device, settings.quantization)
            # From here on the first rank may serve, and finishes its calls first: signals that all ranks get do not end
            # this one.
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, lambda: None)
            follower = await worker.run(Follower, model, options)
        log.info("share loaded", rank=place.rank, stage=place.stage, share=place.share, device=model.description.device)
        try:
            await worker.run(follower.run)
        except RuntimeError as error:
            raise PeerUnavailable(
                f"rank {place.rank} lost the first rank, or another of its stage, or a pass took longer than "
                f"--rank-timeout-s {settings.rank_timeout_s:g}: {error}"
            ) from error


def _end_without_first(ranks: Ranks) -> NoReturn:
    ranks.remove_meeting()
    os._exit(1)


@asynccontextmanager
async def leading(group: Group | None, ranks: Ranks, worker: ModelWorker, timeout_s: float) -> AsyncIterator[None]:
    """Watch the other ranks while the block runs, and end them after it. Without one the worker's device is lost."""
    if group is None:
        yield
        return
    watching = [
        asyncio.create_task(_keep_beating(group, worker, timeout_s)),
        asyncio.create_task(_watch(ranks, worker)),
    ]
    try:
        yield
    finally:
        for one in watching:
            one.cancel()
    await worker.run(_end, group)


async def _keep_beating(group: Group, worker: ModelWorker, timeout_s: float) -> None:
    with suppress(PeerUnavailable):  # the worker has noticed
        while True:
            await asyncio.sleep(timeout_s / BEATS)
            await worker.run(group.beat)


async def _watch(ranks: Ranks, worker: ModelWorker) -> None:
    await ranks.broken()
    log.error("another rank of this model ended")
    worker.lose_device()


def _end(group: Group) -> None:
    with group.in_step():
        group.tell(End())
    group.close()
