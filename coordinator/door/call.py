"""One call for output, however it is carried: read, admitted, queued, told of, and ended.

Owns the order of these, and the call's record and notes for its trace. Knows nothing of streams of gRPC.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import grpc
import structlog

from coordinator.door.admission import Admission
from coordinator.door.admission_threads import AdmissionThreads
from coordinator.door.current_model import CurrentModel
from coordinator.door.record import RequestMetrics, RequestRecord
from coordinator.door.tracer import RequestTracer, begin_request, deliver, name_request, queue_request
from coordinator.drafting.draft_models import DraftModels
from coordinator.placement.dispatcher import Dispatcher
from coordinator.requests.generation import Request
from coordinator.requests.stream import Stream
from paceline.errors import PacelineError
from paceline.types import DraftingOptions, DraftSource, GenerationAccepted, GenerationRequest, OutputPiece
from paceline.wire import as_told

log = structlog.get_logger()


@dataclass(frozen=True)
class Calls:
    """Makes calls, of the parts that all of them use."""

    model: CurrentModel
    threads: AdmissionThreads
    dispatcher: Dispatcher
    drafts: DraftModels
    metrics: RequestMetrics
    tracer: RequestTracer

    def arrived(self, given_id: str = "") -> "Call":
        """Return a new call, with its caller's id if it gave one. Its span, if it has one, must be the current one."""
        return Call(self, given_id)


class Call:
    def __init__(self, parts: Calls, given_id: str) -> None:
        self._parts = parts
        self._record = RequestRecord(parts.metrics, given_id=given_id)
        name_request(self._record.request_id)

    async def queue(
        self, read: Callable[[], GenerationRequest], byte_count: int, timeout_s: float | None
    ) -> GenerationAccepted:
        """Admit and queue the request that `read` returns, in a thread, from so many bytes.

        `timeout_s` is the time that is left for it; None: any. Raise the error that refuses it.
        """
        parts, arrived_s = self._parts, time.perf_counter()
        # Refuse early when there is no room even for one output: tokenizing may take long.
        parts.dispatcher.check_room(1)
        admission = None
        while admission is not parts.model.admission:
            # Again when another model took the place of the one that the request was read for.
            admission = parts.model.admission
            admitted = await parts.threads.run(partial(_admit, admission, read), byte_count)
        admitted.request_id = self._record.request_id
        if timeout_s is not None:
            admitted.deadline_s = arrived_s + timeout_s
        queue_request(admitted)
        parts.dispatcher.submit(admitted)
        self._record.queue(admitted)
        self._note_missing_model(admitted.generations[0].drafting)
        model = parts.model.target
        return GenerationAccepted(
            admitted.request_id,
            admitted.seed,
            admitted.prompt_count,
            model.identity.model_digest,
            model.model_id,
            admitted.prompt_time_s,
            admitted.generations[0].output.max_new_tokens,
        )

    def _note_missing_model(self, drafting: DraftingOptions) -> None:
        """Tell of a draft model that no draft service has. It is no error: models come and go under requests."""
        model = drafting.draft_model
        if model and drafting.allows(DraftSource.DRAFT) and self._parts.drafts.lacks(model):
            # Without the name: what a client sends stays out of the log.
            known = sorted({one.model_id for one in self._parts.drafts.describe()})
            log.info(
                "no draft service has the model of drafting.draft_model",
                request_id=self._record.request_id,
                models=known,
            )

    @property
    def request(self) -> Request:
        """The request, once it is queued."""
        assert self._record.queued
        return self._record.queued

    @property
    def stream(self) -> Stream:
        return self.request.stream

    def deliver(self, piece: OutputPiece) -> None:
        """Note that a piece is about to be sent."""
        is_first = self._record.deliver(piece)
        if is_first or piece.finish:
            deliver(self.request, piece, is_first=is_first)

    def failed(self, error: Exception) -> PacelineError:
        """Note the error that is about to end the call. Return it as its caller may see it, with the request's id.

        Sequence ids are replaced by the request's id: only their secrecy keeps strangers from a sequence.
        """
        record = self._record
        record.fail(error)
        shown = copy.copy(as_told(error))
        shown.metadata = {key: value for key, value in shown.metadata.items() if key != "sequence_id"}
        shown.metadata["request_id"] = record.request_id
        for generation in record.queued.generations if record.queued else ():
            shown.message = shown.message.replace(generation.sequence_id, record.request_id)
        return shown

    def end(self, code: grpc.StatusCode) -> None:
        """Free what the call has, and tell of its end."""
        record = self._record
        if record.queued:
            self._parts.dispatcher.abandon(record.queued)
            self._parts.tracer.end(record.queued, record.queued_s, record.time_to_first_token_s)
        record.end(code)


def _admit(admission: Admission, read: Callable[[], GenerationRequest]) -> Request:
    """Read and admit a request. Runs in a thread: it takes longer for a longer request, and nobody else is to wait."""
    asked = read()
    request = admission.admit(asked)
    begin_request(asked, request, admission.served.target.model_id)
    return request
