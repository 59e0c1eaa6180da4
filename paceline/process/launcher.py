"""A cluster's services as processes of this machine, for the command line and the tests.

Owns the order of starting and stopping. `cluster_plan` decides the settings, `supervision` restarts processes.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from paceline.errors import StartupError
from paceline.process.cluster_plan import OTHERWISE, ClusterOptions, ServicePlan, plan_cluster
from paceline.process.service_process import STOP_SLACK_S, Endpoint, ServiceProcess
from paceline.process.supervision import Tell, fail_at_end, keep_running
from paceline.process.variables import NO_DRAFT
from paceline.tasks import side_by_side
from paceline.wire.ports import check_ports_free


@dataclass(frozen=True)
class Addresses:
    """`host:port` of each service as seen from this machine, and URLs."""

    coordinator: str
    draft: str | None
    """None without a draft service."""
    target: str
    metrics_urls: tuple[str, ...]
    """URLs of the processes of services that run, in the order above; empty when metrics are not served."""
    gateway_url: str | None = None
    """None without a gateway."""


@asynccontextmanager
async def running_cluster(
    options: ClusterOptions, tell: Tell | None = None, otherwise: ClusterOptions = OTHERWISE
) -> AsyncIterator[Addresses]:
    """Start the services and yield their addresses; on exit stop the coordinator first, so no request loses its models.

    `plan_cluster` decides the settings. With `tell`, which gets messages for people, a service that ends is restarted
    at its address. Without it, the end of a service ends the block with PeerFailed. Raise StartupError when a setting
    is wrong or a service ends before it listens or cannot be restarted; its own message is on stderr by then.
    """
    plan = plan_cluster(options, otherwise)
    check_ports_free(plan.listens)
    if options.trace_dir:
        _make_folder(options.trace_dir)
    async with AsyncExitStack() as stack:
        models = [_service(one, (), stack) for one in (plan.target, plan.draft) if one]
        async with side_by_side() as starting:
            starts = [starting.create_task(model.start()) for model in models]
        at_target, *at_drafts = (start.result() for start in starts)
        draft = at_drafts[0].address if at_drafts else None
        addresses = ("--target", at_target.address, "--draft", draft or NO_DRAFT)
        coordinator = _service(plan.coordinator, addresses, stack)
        async with side_by_side() as watching:

            def watch(service: ServiceProcess) -> asyncio.Task[NoReturn]:
                return watching.create_task(keep_running(service, tell) if tell else fail_at_end(service))

            watches = [watch(model) for model in models]
            at_coordinator = await coordinator.start()
            watches.append(watch(coordinator))
            gateway = await _started_gateway(plan.gateway, at_coordinator.address, stack)
            if gateway:
                watches.append(watch(gateway[0]))
            urls = tuple(url for one in (at_coordinator, *at_drafts, at_target) for url in one.metrics_urls)
            gateway_url = _url(plan.gateway, gateway[1]) if plan.gateway and gateway else None
            yield Addresses(at_coordinator.address, draft, at_target.address, urls, gateway_url)
            for one in watches:
                one.cancel()


def _make_folder(trace_dir: str) -> None:
    try:
        os.makedirs(trace_dir, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"--trace-dir {trace_dir} cannot be made: {error.strerror}; name a folder, or where one can be made"
        ) from error


async def _started_gateway(
    plan: ServicePlan | None, coordinator: str, stack: AsyncExitStack
) -> "tuple[ServiceProcess, Endpoint] | None":
    """Start the gateway, and have the stack stop it; None without a plan for one."""
    if plan is None:
        return None
    gateway = _service(plan, ("--coordinator", coordinator), stack)
    return gateway, await gateway.start()


def _url(plan: ServicePlan, gateway: Endpoint) -> str:
    return f"{'https' if plan.settings.tls_certificate else 'http'}://{gateway.address}"


def _service(plan: ServicePlan, addresses: tuple[str, ...], stack: AsyncExitStack) -> ServiceProcess:
    """Return a service that was not started yet, and have the stack stop it."""
    service = ServiceProcess(plan.module, (*plan.flags, *addresses))
    # A service that has processes of its own kills those that do not end in time: it must be there for longer.
    stack.push_async_callback(service.stop, plan.settings.shutdown_grace_s + 2 * STOP_SLACK_S)
    return service
