"""The part of a servicer that draft and target share: a stream's requests, cached sequences, the description.

Owns no message of either service: each servicer writes its own.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from paceline.checks import MAX_ROWS, check_row_count
from paceline.codec.models import model_to_pb
from paceline.codec.rounds import lengths_from_pb, rollbacks_to_pb
from paceline.codec.versions import check_request_version, versions_to_pb
from paceline.engine.runner import Runner
from paceline.model_service.worker import ModelWorker
from paceline.scope import RowT
from paceline.security.access import caller_scope
from paceline.types import CallTiming
from paceline.wire import Exchanges

Context = grpc.aio.ServicerContext[Any, Any]
ResultT = TypeVar("ResultT")


class ModelServicer:
    """Translates, runs the work in the model's thread, and translates back."""

    def __init__(self, runner: Runner, worker: ModelWorker, exchanges: Exchanges, max_rows: int = MAX_ROWS) -> None:
        self._runner = runner
        self._identity = runner.describe().identity
        self._worker = worker
        self._exchanges = exchanges
        self._max_rows = max_rows

    def _answers(
        self,
        method: str,
        requests: AsyncIterator[Any],
        answer: Callable[[str, Any], Awaitable[Any]],
        context: Context,
        unasked: asyncio.Queue[Any] | None = None,
    ) -> AsyncIterator[Any]:
        """Answer each request of a stream; `answer` gets the caller's scope and the request.

        What is put into `unasked` is sent between the answers.
        """
        return self._exchanges.answers(method, requests, partial(answer, caller_scope(context)), unasked)

    async def _run_rows(
        self,
        scope: str,
        request: Any,
        read: Callable[[Any], list[RowT]],
        work: Callable[[Sequence[RowT], str], ResultT],
    ) -> tuple[list[RowT], ResultT, CallTiming]:
        """Return a request's rows, what came of them, and how long that took."""
        check_request_version(request.context)
        check_row_count(len(request.rows), self._max_rows)
        rows = read(request)
        names: frozenset[str] = frozenset(scope + row.sequence_id for row in rows)
        result, timing = await self._worker.run_about(names, work, rows, scope)
        return rows, result, timing

    async def _roll_back(self, request: Any, context: Context) -> list[Any]:
        lengths = lengths_from_pb(request.sequences)
        results = await self._worker.run(self._runner.rollback, lengths, caller_scope(context))
        return rollbacks_to_pb(lengths, results)

    async def _release(self, request: Any, context: Context) -> int:
        return await self._worker.run(self._runner.release, list(request.sequence_ids), caller_scope(context))

    def _description(self) -> dict[str, Any]:
        return {"model": model_to_pb(self._runner.describe()), "wire": versions_to_pb()}
