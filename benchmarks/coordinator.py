"""What a round costs the coordinator itself: `python -m benchmarks.coordinator`.

The coordinator is the real process and every call crosses real gRPC, but the models answer at once: what is left is
grouping, codec, text, streams and gRPC.
"""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import grpc
import psutil
import typer
import uvloop
from grpc.aio import EOF
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.processes import coordinator_process, cpu_s
from benchmarks.suffixes import suffixes
from draft_service.servicer import SERVICE_NAME as DRAFT_SERVICE
from draft_service.servicer import DraftServicer
from paceline.client import Client
from paceline.codec.generation import request_to_pb
from paceline.engine.calls import Call
from paceline.engine.model.checkpoint import find_checkpoint, read_tokenizer
from paceline.model_service.servicer import Answering
from paceline.model_service.worker import ModelWorker
from paceline.process.service_process import Endpoint, running_service
from paceline.process.variables import NO_DRAFT
from paceline.text import TextCodec, fingerprint
from paceline.types import (
    CacheDescription,
    GenerationRequest,
    ModelDescription,
    Prefilled,
    Proposal,
    ProposeRow,
    Text,
    TokenizerFiles,
    Verdict,
    VerifyOutcome,
    VerifyRow,
)
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from paceline.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from paceline.wire import Exchanges, running_server, termination
from target_service.servicer import SERVICE_NAME as TARGET_SERVICE
from target_service.servicer import TargetServicer

app = typer.Typer(add_completion=False, help=__doc__)
app.command()(suffixes)
console = Console(highlight=False)

DRAFTED = (300, 400, 500, 600, 700, 800, 900, 1000)
MAX_LENGTH = 10_000
HEADS_COUNT = "5"
"""Most tokens that the target's heads draft, where it has any and `auto` decides how many."""

DraftCount = Annotated[str, typer.Option(help="a number, or auto")]
HeadsDraft = Annotated[bool, typer.Option(help="the target's heads draft in place of a draft service")]
Read = Callable[[Sequence[GenerationRequest]], Awaitable[None]]
"""Sends requests, and reads their outputs."""


class NoModel:
    """Stands in for a runner, and caches nothing."""

    def __init__(self, tokenizer: TokenizerFiles, max_length: int, heads_count: int = 0) -> None:
        self.model = self
        self.tokenizer = tokenizer
        self._max_length = max_length
        self._heads_count = heads_count

    def describe(self) -> ModelDescription:
        codec = TextCodec(self.tokenizer)
        return ModelDescription(
            model_id="instant",
            architecture="None",
            vocabulary_size=codec.tokenizer.get_vocab_size(),
            tokenizer_fingerprint=fingerprint(codec.tokenizer),
            max_length=self._max_length,
            end_token_ids=(),
            device="cpu",
            dtype="float32",
            parameter_count=0,
            cache=CacheDescription(max_length=self._max_length, prefill_chunk_tokens=256),
            heads_draft_count=self._heads_count,
        )

    def release(self, sequence_ids: Sequence[str], scope: str) -> int:
        return len(sequence_ids)


class NothingToPrepare:
    """Stands in for what prepares drafts between calls."""

    def work(self) -> None:
        return None


class InstantDrafter:
    def __init__(self, runner: NoModel) -> None:
        self.runner = runner
        self.preparing = NothingToPrepare()

    def propose_calls(self, calls: Sequence[Call[ProposeRow]]) -> list[list[Proposal]]:
        return [[self._propose(row, row.base_length + len(row.token_ids)) for row in call.rows] for call in calls]

    def _propose(self, row: ProposeRow, length: int) -> Proposal:
        if row.following_count:
            return Proposal((), length)
        return Proposal(self.drafts(row), length + row.draft_count - 1)

    def drafts(self, row: ProposeRow) -> tuple[int, ...]:
        return DRAFTED[: row.draft_count]


class InstantVerifier:
    def __init__(self, runner: NoModel) -> None:
        self.runner = runner

    def verify_calls(self, calls: Sequence[Call[VerifyRow]]) -> list[list[VerifyOutcome]]:
        return [[self._verify(row, row.base_length + len(row.token_ids)) for row in call.rows] for call in calls]

    def _verify(self, row: VerifyRow, length: int) -> VerifyOutcome:
        return Prefilled(length) if row.following_count else self.verdict(row, length)

    def verdict(self, row: VerifyRow, length: int) -> Verdict:
        """Accept a share of the drafts that changes from round to round, about two thirds."""
        accepted = min(len(row.draft_token_ids), 2 + length % 4)
        return Verdict(accepted, 1100, length + accepted)


class HeadsVerifier(InstantVerifier):
    """A target whose heads draft, and that runs one further round, as a near one does."""

    def verdict(self, row: VerifyRow, length: int) -> Verdict:
        first = self._with_drafts(row, super().verdict(row, length))
        if not row.further_count:
            return first
        row = replace(row, draft_token_ids=first.draft_token_ids)
        return replace(first, further=(self._with_drafts(row, super().verdict(row, first.cached_length + 1)),))

    def _with_drafts(self, row: VerifyRow, verdict: Verdict) -> Verdict:
        return replace(verdict, draft_token_ids=DRAFTED[: row.propose_count])


class EchoDrafter(InstantDrafter):
    """Repeats a sequence's last token, so that the prompt determines the output."""

    def drafts(self, row: ProposeRow) -> tuple[int, ...]:
        return row.token_ids[-1:] * row.draft_count


class EchoVerifier(InstantVerifier):
    def verdict(self, row: VerifyRow, length: int) -> Verdict:
        accepted = len(row.draft_token_ids)
        return Verdict(accepted, row.token_ids[-1], length + accepted)


@app.command(hidden=True)
def models(max_length: int = MAX_LENGTH, echo: bool = False, heads_count: int = 0) -> None:
    """Serve both instant models until standard input ends; prints their addresses."""
    uvloop.run(_serve_models(max_length, echo, heads_count))


async def _serve_models(max_length: int, echo: bool, heads_count: int) -> None:
    model = NoModel(builtin_tokenizer(), max_length, heads_count)
    drafter = EchoDrafter(model) if echo else InstantDrafter(model)
    verifier = EchoVerifier(model) if echo else HeadsVerifier(model) if heads_count else InstantVerifier(model)
    async with served_draft(drafter) as draft, served_target(verifier) as target:
        print(draft, target, flush=True)
        await termination(stop_with_stdin=True)


def builtin_tokenizer() -> TokenizerFiles:
    tokenizer = read_tokenizer(find_checkpoint("builtin:target"))
    assert tokenizer is not None
    return tokenizer


@asynccontextmanager
async def served_draft(drafter: InstantDrafter) -> AsyncIterator[str]:
    """Serve a draft without a model; yield the address."""
    with closing(ModelWorker(1)) as worker:
        servicer: Any = DraftServicer(drafter, Answering(worker, Exchanges()))  # type: ignore[arg-type]
        async with _served(DRAFT_SERVICE, partial(add_DraftServiceServicer_to_server, servicer)) as address:
            yield address


@asynccontextmanager
async def served_target(verifier: InstantVerifier) -> AsyncIterator[str]:
    """Serve a target without a model; yield the address."""
    with closing(ModelWorker(1)) as worker:
        servicer: Any = TargetServicer(verifier, Answering(worker, Exchanges()))  # type: ignore[arg-type]
        async with _served(TARGET_SERVICE, partial(add_TargetServiceServicer_to_server, servicer)) as address:
            yield address


@asynccontextmanager
async def _served(name: str, add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    async with running_server("127.0.0.1", 0, [name], add, grace_s=1) as server:
        await server.set_serving(True)
        yield server.address


@asynccontextmanager
async def instant_models(*flags: str) -> AsyncIterator[tuple[str, str]]:
    """Run both instant models; yield the addresses of the draft and of the target service."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.coordinator", "models", *flags, stdin=PIPE, stdout=PIPE
    )
    assert process.stdin and process.stdout
    try:
        draft, target = (await process.stdout.readline()).decode().split()
        yield draft, target
    finally:
        process.stdin.close()
        await process.wait()


class Door(StrEnum):
    TEXT = "text"
    """`GenerateText`: a call for each request."""
    STREAM = "stream"
    """`GenerateStream`: all requests over one stream, as a gateway's."""


@app.command()
def rounds(
    batch_size: int = 8,
    draft_count: DraftCount = "5",
    runs: int = 5,
    max_new_tokens: int = 1000,
    door: Door = Door.TEXT,
    omit_text: bool = False,
    heads: HeadsDraft = False,
) -> None:
    """CPU milliseconds a round costs the coordinator's process, all its threads counted."""
    request = GenerationRequest(Text("one two three"), max_new_tokens=max_new_tokens, omit_text=omit_text)
    uvloop.run(_rounds(batch_size, draft_count, runs, request, door, heads))


async def _rounds(
    batch_size: int, draft_count: str, runs: int, request: GenerationRequest, door: Door, heads: bool
) -> None:
    async with _coordinator(batch_size, draft_count, heads=heads) as service, Client(service.address) as client:
        process = coordinator_process()
        read = partial(_by_calls, client) if door is Door.TEXT else partial(_by_stream, service.address)
        for number in range(runs + 1):  # the first warms up
            spent = await _one_run(client, process, read, request, 2 * batch_size)
            if number:
                console.print(spent)


@asynccontextmanager
async def _coordinator(batch_size: int, draft_count: str, *flags: str, heads: bool = False) -> AsyncIterator[Endpoint]:
    """Run a coordinator over instant models."""
    heads_count = (draft_count if draft_count.isdecimal() else HEADS_COUNT) if heads else "0"
    async with instant_models("--heads-count", heads_count) as (draft, target):
        models = ["--draft", NO_DRAFT if heads else draft, "--target", target, "--log-level", "error"]
        sizes = ["--batch-size", str(batch_size), "--draft-count", draft_count]
        async with running_service("coordinator", [*models, *sizes, *flags]) as service:
            yield service


@app.command()
def host(
    processes: int = 1,
    connections: int = 4,
    batch_size: int = 64,
    draft_count: DraftCount = "5",
    runs: int = 5,
    max_new_tokens: int = 500,
    omit_text: bool = False,
    heads: HeadsDraft = False,
) -> None:
    """Tokens/s that so many coordinator processes here give to gateways' streams; readers and models are here too."""
    request = GenerationRequest(Text("one two three"), max_new_tokens=max_new_tokens, omit_text=omit_text)
    uvloop.run(_host(processes, connections, batch_size, draft_count, runs, request, heads))


async def _host(
    processes: int,
    connections: int,
    batch_size: int,
    draft_count: str,
    runs: int,
    request: GenerationRequest,
    heads: bool,
) -> None:
    count = 2 * batch_size * processes
    async with _coordinator(batch_size, draft_count, "--processes", str(processes), heads=heads) as service:
        for number in range(runs + 1):  # the first warms up
            requests, began = [replace(request, seed=seed) for seed in range(count)], time.perf_counter()
            parts = [requests[first::connections] for first in range(connections)]
            await asyncio.gather(*(_by_stream(service.address, one) for one in parts))
            if number:
                elapsed_s = time.perf_counter() - began
                console.print(f"{count * (request.max_new_tokens or 0) / elapsed_s:.0f} tokens/s")


async def _one_run(client: Client, process: psutil.Process, read: Read, request: GenerationRequest, count: int) -> str:
    before, cpu, began = (await client.describe()).statistics, cpu_s(process), time.perf_counter()
    await read([replace(request, seed=seed) for seed in range(count)])
    spent_s, elapsed_s = cpu_s(process) - cpu, time.perf_counter() - began
    after = (await client.describe()).statistics
    round_count = after.round_count - before.round_count
    return (
        f"{1e3 * spent_s / round_count:.2f} ms of CPU a round, {round_count} rounds, "
        f"{(after.committed_count - before.committed_count) / elapsed_s:.0f} tokens/s"
    )


async def _by_calls(client: Client, requests: Sequence[GenerationRequest]) -> None:
    await asyncio.gather(*(client.complete(one) for one in requests))


async def _by_stream(address: str, requests: Sequence[GenerationRequest]) -> None:
    """Read the messages of one stream, and do nothing with what is in them."""
    # In a pool of its own, or streams would share a connection, and so a process.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stream: Any = GenerationServiceStub(channel).GenerateStream()
        for call_id, request in enumerate(requests):
            started = pb.StartedCall(request=request_to_pb(request))
            await stream.write(pb.GenerateStreamRequest(call_id=call_id, start=started))
        await stream.done_writing()
        while (message := await stream.read()) is not EOF:
            for update in message.updates:
                assert not update.ended.code, update.ended.message


if __name__ == "__main__":
    run_command(app)
