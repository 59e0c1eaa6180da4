"""A target service that fails or hangs on a signal (see `troubles`): `python -m benchmarks.soak.troubled_target`.

It always answers health checks, and is the target service in everything else.
"""

import signal

import grpc

from benchmarks.soak.troubles import ERRORS, HANG, Trouble
from paceline.codec.names import TARGET_SERVICE
from paceline.engine.runner import Runner
from paceline.model_service.servicer import Answering
from paceline.model_service.serving import serve_model
from paceline.process.ranks import Ranks
from paceline.process.service import run_service, server_options
from paceline.process.settings import parse_settings
from paceline.scope import Caller
from paceline.types import RankPlace
from paceline.v1 import target_service_pb2 as pb
from paceline.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from target_service.config import TargetSettings
from target_service.servicer import TargetServicer
from target_service.verifier import Verifier

MODULE = "benchmarks.soak.troubled_target"


class TroubledServicer(TargetServicer):
    def __init__(self, trouble: Trouble, verifier: Verifier, answering: Answering) -> None:
        super().__init__(verifier, answering)
        self._trouble = trouble

    async def _verify(self, caller: Caller, request: pb.VerifyTokensRequest) -> pb.VerifyTokensResponse:
        await self._trouble.strike()
        return await super()._verify(caller, request)


def main() -> None:
    settings, trouble = parse_settings(TargetSettings, "target_service"), Trouble()
    for number in (ERRORS, HANG):
        signal.signal(number, trouble.toggle)

    def add(runner: Runner, answering: Answering, server: grpc.aio.Server) -> None:
        verifier = Verifier(runner, settings.threads_beside_draft)
        add_TargetServiceServicer_to_server(TroubledServicer(trouble, verifier, answering), server)

    alone = Ranks(RankPlace(), are_here=False)
    run_service(MODULE, settings, serve_model(MODULE, settings, server_options(settings), alone, TARGET_SERVICE, add))


if __name__ == "__main__":
    main()
