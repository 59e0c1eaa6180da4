"""The standard health service: what serves, for those who ask and those who watch.

The servicer of grpcio-health-checking writes to a watcher within the lock that every change of a status takes (seen
with 1.85.1). Anybody may watch, so one who read nothing could keep a service from telling that it stops, and so from
stopping. Here no change waits for a watcher.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.security.access import Context

Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        """Set with the next change."""
        self._is_over = False

    def set(self, name: str, status: int) -> None:
        """Tell a status from now on, unless `end` was called."""
        if not self._is_over:
            self._statuses[name] = status
            self._tell()

    def end(self) -> None:
        """Tell NOT_SERVING of everything, for good."""
        self._is_over = True
        self._statuses = dict.fromkeys(self._statuses, Status.NOT_SERVING)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service is served here")
        return Status(status=self._statuses[request.service])

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Tell the status now and whenever it is another one. A slow reader may miss what was in between."""
        told: int | None = None
        while True:
            changed, status = self._changed, self._statuses.get(request.service, Status.SERVICE_UNKNOWN)
            if status == told:
                await changed.wait()
            else:
                told = status
                yield Status(status=status)
