"""The part of a model service's life that draft and target share: load, serve until told to stop, drain."""

from collections.abc import Callable

import grpc
import structlog

from paceline.engine.loader import load_model
from paceline.engine.runner import Runner
from paceline.engine.worker import ModelWorker
from paceline.rpc import running_server, termination
from paceline.service import announce
from paceline.settings import ModelServiceSettings

log = structlog.get_logger()


async def serve_model(
    name: str,
    settings: ModelServiceSettings,
    service_name: str,
    add_servicer: Callable[[Runner, ModelWorker, grpc.aio.Server], None],
) -> None:
    """Load the model in its thread, then serve it until SIGTERM or SIGINT."""
    worker = ModelWorker(settings.threads)
    try:
        model = await worker.run(load_model, settings.model, settings.dtype)
        runner = Runner(model, settings.kv_memory)
        log.info("model loaded", model=settings.model, dtype=model.description.dtype, device=model.description.device)
        async with running_server(
            settings.host,
            settings.port,
            [service_name],
            lambda server: add_servicer(runner, worker, server),
            grace_s=settings.shutdown_grace_s,
        ) as server:
            await server.set_serving(True)
            announce(name, server.address)
            await termination()
            log.info("stopping", grace_s=settings.shutdown_grace_s)
    finally:
        worker.close()
