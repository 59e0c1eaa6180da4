"""The draft and target services as the coordinator sees them: calls with deadlines, answers as values or errors."""

from collections.abc import Sequence as Rows
from collections.abc import Sized

import grpc

from paceline.codec.models import model_from_pb, tokenizer_from_pb
from paceline.codec.rounds import proposals_from_pb, propose_rows_to_pb, verdicts_from_pb, verify_rows_to_pb
from paceline.errors import PeerFailed, TokenizerNotFound
from paceline.rpc import translated_errors
from paceline.types import ModelDescription, Proposals, ProposeRow, TokenizerFiles, Verdicts, VerifyRow
from paceline.v1 import draft_service_pb2, target_service_pb2
from paceline.v1.draft_service_pb2_grpc import DraftServiceStub
from paceline.v1.target_service_pb2_grpc import TargetServiceStub

TARGET_SERVICE = target_service_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


class RemoteDrafter:
    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub = DraftServiceStub(channel)
        self._timeout_s = timeout_s

    async def propose(self, rows: Rows[ProposeRow]) -> Proposals:
        with translated_errors():
            response = await self._stub.ProposeTokens(propose_rows_to_pb(rows), timeout=self._timeout_s)
        proposals = proposals_from_pb(response)
        _check_count(rows, proposals.results)
        return proposals

    async def release(self, sequence_ids: list[str]) -> None:
        request = draft_service_pb2.ReleaseDraftSequencesRequest(sequence_ids=sequence_ids)
        with translated_errors():
            await self._stub.ReleaseDraftSequences(request, timeout=self._timeout_s)

    async def describe(self, timeout_s: float, *, wait_for_ready: bool = False) -> ModelDescription:
        request = draft_service_pb2.DescribeDraftModelRequest()
        with translated_errors():
            response = await self._stub.DescribeDraftModel(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        return model_from_pb(response.model)


class RemoteVerifier:
    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub = TargetServiceStub(channel)
        self._timeout_s = timeout_s

    async def verify(self, rows: Rows[VerifyRow]) -> Verdicts:
        with translated_errors():
            response = await self._stub.VerifyTokens(verify_rows_to_pb(rows), timeout=self._timeout_s)
        verdicts = verdicts_from_pb(response)
        _check_count(rows, verdicts.results)
        return verdicts

    async def release(self, sequence_ids: list[str]) -> None:
        request = target_service_pb2.ReleaseTargetSequencesRequest(sequence_ids=sequence_ids)
        with translated_errors():
            await self._stub.ReleaseTargetSequences(request, timeout=self._timeout_s)

    async def describe(self, timeout_s: float, *, wait_for_ready: bool = False) -> ModelDescription:
        request = target_service_pb2.DescribeTargetModelRequest()
        with translated_errors():
            response = await self._stub.DescribeTargetModel(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        return model_from_pb(response.model)

    async def download_tokenizer(self) -> TokenizerFiles | None:
        """Return None when the target has no tokenizer: then prompts and outputs are token ids only."""
        try:
            with translated_errors():
                call = self._stub.DownloadTokenizer(
                    target_service_pb2.DownloadTokenizerRequest(), timeout=self._timeout_s
                )
                return tokenizer_from_pb([piece async for piece in call])
        except TokenizerNotFound:
            return None


def _check_count(rows: Sized, results: Sized) -> None:
    if len(results) != len(rows):
        raise PeerFailed(f"{len(rows)} rows were sent and {len(results)} results came back; the peer is not compatible")
