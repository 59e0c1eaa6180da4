"""The part of a servicer that draft and target share: a stream's requests, cached sequences, the description.

Owns no message of either service: each servicer writes its own.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from paceline.checks import MAX_ROWS, check_row_count
from paceline.codec.models import model_to_pb
from paceline.codec.rounds import lengths_from_pb, rollbacks_to_pb
from paceline.codec.versions import check_request_version, versions_to_pb
from paceline.engine.calls import Call
from paceline.engine.runner import Runner
from paceline.model_service.worker import ModelWorker
from paceline.scope import EQUAL, Caller, RowT, Weights
from paceline.security.access import Context, caller_of
from paceline.tasks import outlasting
from paceline.types import CallTiming
from paceline.wire import Exchanges

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Answering:
    """What calls are answered with and bounded by, whatever the model."""

    worker: ModelWorker
    exchanges: Exchanges
    max_rows: int = MAX_ROWS
    """Most rows of a call."""
    weights: Weights = field(default_factory=lambda: EQUAL)


class ModelServicer:
    """Translates, runs the work in the model's thread, and translates back."""

    def __init__(self, runner: Runner, answering: Answering) -> None:
        self._runner = runner
        described = runner.describe()
        self._identity = described.identity
        self._chunk_tokens = described.cache.prefill_chunk_tokens
        self._worker = answering.worker
        self._exchanges = answering.exchanges
        self._max_rows = answering.max_rows
        self._weights = answering.weights
        self._releases: set[asyncio.Task[int]] = set()

    def _answers(
        self,
        method: str,
        requests: AsyncIterator[Any],
        answer: Callable[[Caller, Any], Awaitable[Any]],
        context: Context,
        unasked: asyncio.Queue[Any] | None = None,
    ) -> AsyncIterator[Any]:
        """Answer each request of a stream; `answer` gets the caller and the request.

        What is put into `unasked` is sent between the answers.
        """
        return self._exchanges.answers(method, requests, partial(answer, caller_of(context, self._weights)), unasked)

    async def _run_rows(
        self,
        caller: Caller,
        request: Any,
        read: Callable[[Any], list[RowT]],
        work: Callable[[Sequence[Call[RowT]]], Sequence[ResultT]],
    ) -> tuple[list[RowT], ResultT, CallTiming]:
        """Free what the request says; return its rows, what came of them, and how long that took."""
        check_request_version(request.context)
        check_row_count(len(request.rows), self._max_rows)
        rows = read(request)
        call: Call[RowT] = Call(rows, caller)
        serving = self._worker.run_call(work, call, call.token_count(self._chunk_tokens))
        if released := list(request.context.released_sequence_ids):
            _, (result, timing) = await asyncio.gather(self._free(caller, released), serving)  # in this order
        else:
            result, timing = await serving
        return rows, result, timing

    async def _roll_back(self, request: Any, context: Context) -> list[Any]:
        lengths, caller = lengths_from_pb(request.sequences), caller_of(context, self._weights)
        results = await self._worker.run_for(caller, self._runner.rollback, lengths, caller.scope)
        return rollbacks_to_pb(lengths, results)

    async def _release(self, request: Any, context: Context) -> int:
        """Free sequences, also for a caller that waits no longer: it would ask again for what a long pass holds up."""
        work = self._free(caller_of(context, self._weights), list(request.sequence_ids))
        return await outlasting(work, self._releases)

    async def _free(self, caller: Caller, sequence_ids: list[str]) -> int:
        return await self._worker.run_for(caller, self._runner.release, sequence_ids, caller.scope)

    def _description(self) -> dict[str, Any]:
        described = replace(self._runner.describe(), max_rows=self._max_rows)
        return {"model": model_to_pb(described), "wire": versions_to_pb()}
