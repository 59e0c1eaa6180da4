"""A target service that fails or hangs on a signal (see `troubles`): `python -m benchmarks.soak.troubled_target`.

It always answers health checks, and is the target service in everything else.
"""

import signal
from typing import Any

import grpc

from benchmarks.soak.troubles import ERRORS, HANG, Trouble
from paceline.checks import MAX_ROWS
from paceline.engine.runner import Runner
from paceline.model_service.serving import serve_model
from paceline.model_service.worker import ModelWorker
from paceline.process.ranks import Ranks
from paceline.process.service import run_service, server_options
from paceline.process.settings import parse_settings
from paceline.scope import EQUAL, Caller, Weights
from paceline.types import RankPlace
from paceline.v1 import target_service_pb2 as pb
from paceline.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from paceline.wire import Exchanges
from target_service.config import TargetSettings
from target_service.servicer import SERVICE_NAME, TargetServicer
from target_service.verifier import Verifier

MODULE = "benchmarks.soak.troubled_target"


class TroubledServicer(TargetServicer):
    def __init__(self, trouble: Trouble, *own: Any) -> None:
        """`own` are the arguments of the target service's own servicer."""
        super().__init__(*own)
        self._trouble = trouble

    async def _verify(self, caller: Caller, request: pb.VerifyTokensRequest) -> pb.VerifyTokensResponse:
        await self._trouble.strike()
        return await super()._verify(caller, request)


def main() -> None:
    settings, trouble = parse_settings(TargetSettings, "target_service"), Trouble()
    for number in (ERRORS, HANG):
        signal.signal(number, trouble.toggle)

    def add(
        runner: Runner,
        worker: ModelWorker,
        exchanges: Exchanges,
        server: grpc.aio.Server,
        max_rows: int = MAX_ROWS,
        weights: Weights = EQUAL,
    ) -> None:
        verifier = Verifier(runner, settings.threads_beside_draft)
        servicer = TroubledServicer(trouble, verifier, worker, exchanges, max_rows, weights)
        add_TargetServiceServicer_to_server(servicer, server)

    alone = Ranks(RankPlace(), are_here=False)
    run_service(MODULE, settings, serve_model(MODULE, settings, server_options(settings), alone, SERVICE_NAME, add))


if __name__ == "__main__":
    main()
