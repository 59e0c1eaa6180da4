"""The three services under attack, their answers, and checks of their health afterwards."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from shutil import copy
from typing import Any

import grpc

from coordinator.replicas.clients import RemoteDrafter, RemoteVerifier
from paceline.builtin import __file__ as builtin_file
from paceline.engine.options import EngineOptions
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.observe.spans.provider import make_provider, make_tracer
from paceline.types import GenerationRequest, SamplingParameters, TokenIds
from paceline.wire import open_channel
from tests.checkpoints import write_model, write_related_draft
from tests.clusters import Cluster, cluster
from tests.fuzzing.calls import PATIENCE_S, Answer, Call, complaint, named_sequences, row_statuses, send
from tests.fuzzing.connections import DESCRIBING, connect_and_send, record_call

VOCABULARY_SIZE = 4096
"""Vocabulary size of the tokenizer."""
PROMPT = tuple(range(30, 50))
SAMPLED = SamplingParameters(temperature=0.9, top_p=0.95, presence_penalty=0.3)
HEALTHY = (
    GenerationRequest(TokenIds(PROMPT), max_new_tokens=12),
    GenerationRequest(TokenIds(PROMPT[:7]), max_new_tokens=12, sampling=SAMPLED, seed=77),
)
KNOWN_LINES = ("Invalid encoding on", "codec can't decode byte", "ExecuteBatchError raised in core by servicer method")
"""gRPC's own log lines for metadata and paths that are not text, and for a caller that hung up during its answer.
gRPC keeps the bytes of such metadata, and falls over such a path, for which there is `LastingServer`."""
SETTLING_TURNS = 3000
"""Checks for leftovers before they count as left behind."""

TASKS_OF_A_STREAM = (6, 4)
"""Two tasks of gRPC's stub, one that reads it, one of the handler; of the draft's also two for what comes and goes."""
MOST_STREAMS = 5
"""Two lanes to two model services, and one stream for rows whose drafts were prepared."""


class Unsound(AssertionError):
    """A service answered wrongly, or differs from its former state."""


class Arena:
    def __init__(
        self, running: Cluster, channels: dict[str, grpc.aio.Channel], expected: list[list[int]], log: "ErrorLog"
    ) -> None:
        """`channels` by service name; `expected` holds the healthy requests' tokens, output by output."""
        self._running = running
        self._channels = channels
        self._expected = expected
        self._log = log
        self._idle_task_count = 0
        self._named: set[str] = set()
        self.codes: Counter[tuple[str, str]] = Counter()
        """Answers by method and status."""
        self.row_codes: Counter[tuple[str, str]] = Counter()
        self.healthy_count = 0
        self.connection_count = 0
        self.recorded: tuple[bytes, ...] = ()
        """Bytes that real clients sent over their connections."""

    @property
    def input_count(self) -> int:
        return sum(self.codes.values())

    @property
    def called(self) -> set[str]:
        """Names of methods that answered."""
        return {path.rpartition("/")[2] for path, _ in self.codes}

    async def attack(self, batch: Sequence[Call], *, at_once: bool) -> list[Answer]:
        """Send the calls while healthy requests run; raise Unsound on a wrong answer."""
        healthy = asyncio.gather(*(self._tokens(request) for request in HEALTHY))
        if at_once:
            answers = await asyncio.gather(*map(self._send, batch))
        else:
            answers = [await self._send(one) for one in batch]
        outputs = [tokens for request in await healthy for tokens in request]
        for one, answer in zip(batch, answers, strict=True):
            self._judge(one, answer)
        if outputs != self._expected:
            raise Unsound(f"healthy requests gave {outputs} instead of {self._expected} beside {batch}")
        self.healthy_count += len(HEALTHY)
        return answers

    async def disturb(self, contents: Sequence[bytes]) -> None:
        """Open connections to every service, send these contents and hang up; afterwards all must answer."""
        for address in self._running.addresses:
            await asyncio.gather(*(connect_and_send(address, content) for content in contents))
            self.connection_count += len(contents)
        for one in DESCRIBING:
            await self._answers(one)

    async def _answers(self, one: Call) -> None:
        """Wait until a call is answered: a service that listens anew refuses connections for a moment."""
        ask: Any = self._channels[one.method.containing_service.name].unary_unary(one.path)
        for _ in range(SETTLING_TURNS):
            try:
                await ask(b"", timeout=PATIENCE_S, wait_for_ready=True)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise
                await asyncio.sleep(0.001)
        raise Unsound(f"{one.path} answers no more")

    async def _send(self, one: Call) -> Answer:
        return await send(self._channels[one.method.containing_service.name], one)

    def _judge(self, one: Call, answer: Answer) -> None:
        self.codes[one.path, answer.code.name] += 1
        self._named |= named_sequences(one)
        names = {code.value[0]: code.name for code in grpc.StatusCode}
        self.row_codes.update((one.path, names[status.code]) for status in row_statuses(one, answer))
        if problem := complaint(one, answer):
            raise Unsound(f"{one}: {problem}")

    async def _tokens(self, request: GenerationRequest) -> list[list[int]]:
        return [completion.token_ids for completion in await self._running.client.complete_all(request)]

    async def check(self) -> None:
        """Free the attackers' sequences; raise Unsound if anything else is left, or an error was logged."""
        for name, remote in (("DraftService", RemoteDrafter), ("TargetService", RemoteVerifier)):
            service = remote(self._channels[name], PATIENCE_S)
            service.owe(sorted(self._named))
            await service.release()
        self._named.clear()
        for _ in range(SETTLING_TURNS):
            left = await self._left()
            if not left:
                break
            await asyncio.sleep(0.001)
        else:
            raise Unsound(f"left behind: {left}")
        if self._log.lines:
            raise Unsound(f"logged: {self._log.lines[0]}")

    async def _left(self) -> str:
        described = await self._running.client.describe()
        live, waiting = described.live_sequence_count, described.waiting_sequence_count
        held = self._running.held_sequence_count
        tasks, streams = self._task_count(), self._running.kept_stream_count
        if live or waiting or held or tasks > self._idle_task_count or streams > MOST_STREAMS:
            return (
                f"{live} live, {waiting} waiting, {held} cached sequences, {tasks} of {self._idle_task_count} tasks, "
                f"{streams} streams"
            )
        return ""

    def _task_count(self) -> int:
        """Return the number of tasks without those of kept streams, whose number is chance."""
        kept = zip(TASKS_OF_A_STREAM, self._running.exchanges, strict=True)
        return len(asyncio.all_tasks()) - sum(count * one.waiting_count for count, one in kept)

    async def settle(self) -> None:
        """Note an idle cluster's task count, after healthy requests have opened all connections."""
        calls = zip(self._running.addresses, DESCRIBING, strict=True)
        self.recorded = tuple([await record_call(address, call) for address, call in calls])
        await self.attack([], at_once=True)
        counts: list[int] = []
        while len(counts) < 50 or len(set(counts[-50:])) > 1:
            counts.append(self._task_count())
            await asyncio.sleep(0.01)
        self._idle_task_count = counts[-1]


class ErrorLog(logging.Handler):
    """Keeps complaints of asyncio and gRPC: unretrieved exceptions, failed handlers."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if not any(known in line for known in KNOWN_LINES):
            self.lines.append(line)


@contextmanager
def logged_errors() -> Iterator[ErrorLog]:
    log = ErrorLog()
    logging.getLogger().addHandler(log)
    try:
        yield log
    finally:
        logging.getLogger().removeHandler(log)


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write a tiny target and draft that have the built-in pair's tokenizer and chat template."""
    target = write_model(folder / "target", "Llama", vocab_size=VOCABULARY_SIZE)
    draft = write_related_draft(folder / "draft", target, "Llama", noise=0.05)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        for model in (target, draft):
            copy(Path(builtin_file).parent / "target" / name, model / name)
    return target, draft


@asynccontextmanager
async def arena(folder: Path) -> AsyncIterator[Arena]:
    """Serve a tiny pair, written to the folder, with tracing on."""
    target, draft = write_pair(folder)
    reference = HuggingFaceReference(str(target), "float32").generate(PROMPT, 12)
    tracer = make_tracer(make_provider("fuzz"))
    with logged_errors() as log:
        async with (
            cluster(target, draft, options=EngineOptions(kv_memory="4MiB"), tracer=tracer) as running,
            open_channel(running.draft_address) as draft_channel,
            open_channel(running.target_address) as target_channel,
            open_channel(running.coordinator_address) as channel,
        ):
            sampled = [one.token_ids for one in await running.client.complete_all(HEALTHY[1])]
            channels = {"DraftService": draft_channel, "TargetService": target_channel, "GenerationService": channel}
            attacked = Arena(running, channels, [reference, *sampled], log)
            await attacked.settle()
            yield attacked
