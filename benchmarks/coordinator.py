"""What a round costs the coordinator itself: `python -m benchmarks.coordinator`.

The coordinator is the real process and every call crosses real gRPC, but the models answer at once: what is left is
grouping, codec, text, streams and gRPC.
"""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import psutil
import typer
import uvloop
from rich.console import Console

from benchmarks.processes import coordinator_process, cpu_s
from benchmarks.suffixes import suffixes
from draft_service.servicer import SERVICE_NAME as DRAFT_SERVICE
from draft_service.servicer import DraftServicer
from paceline.client import Client
from paceline.engine.calls import Call
from paceline.engine.model.checkpoint import find_checkpoint, read_tokenizer
from paceline.model_service.worker import ModelWorker
from paceline.process.launcher import running_service
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
from paceline.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server
from paceline.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from paceline.wire import Exchanges, running_server, termination
from target_service.servicer import SERVICE_NAME as TARGET_SERVICE
from target_service.servicer import TargetServicer

app = typer.Typer(add_completion=False, help=__doc__)
app.command()(suffixes)
console = Console(highlight=False)

DRAFTED = (300, 400, 500, 600, 700, 800, 900, 1000)
MAX_LENGTH = 10_000


class NoModel:
    """Stands in for a runner, and caches nothing."""

    def __init__(self, tokenizer: TokenizerFiles, max_length: int) -> None:
        self.model = self
        self.tokenizer = tokenizer
        self._max_length = max_length

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


class EchoDrafter(InstantDrafter):
    """Repeats a sequence's last token, so that the prompt determines the output."""

    def drafts(self, row: ProposeRow) -> tuple[int, ...]:
        return row.token_ids[-1:] * row.draft_count


class EchoVerifier(InstantVerifier):
    def verdict(self, row: VerifyRow, length: int) -> Verdict:
        accepted = len(row.draft_token_ids)
        return Verdict(accepted, row.token_ids[-1], length + accepted)


@app.command(hidden=True)
def models(max_length: int = MAX_LENGTH, echo: bool = False) -> None:
    """Serve both instant models until standard input ends; prints their addresses."""
    uvloop.run(_serve_models(max_length, echo))


async def _serve_models(max_length: int, echo: bool) -> None:
    model = NoModel(builtin_tokenizer(), max_length)
    drafter = EchoDrafter(model) if echo else InstantDrafter(model)
    verifier = EchoVerifier(model) if echo else InstantVerifier(model)
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
        servicer: Any = DraftServicer(drafter, worker, Exchanges())  # type: ignore[arg-type]
        async with _served(DRAFT_SERVICE, partial(add_DraftServiceServicer_to_server, servicer)) as address:
            yield address


@asynccontextmanager
async def served_target(verifier: InstantVerifier) -> AsyncIterator[str]:
    """Serve a target without a model; yield the address."""
    with closing(ModelWorker(1)) as worker:
        servicer: Any = TargetServicer(verifier, worker, Exchanges())  # type: ignore[arg-type]
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


@app.command()
def rounds(batch_size: int = 8, draft_count: int = 5, runs: int = 5, max_new_tokens: int = 1000) -> None:
    """CPU milliseconds a round costs the coordinator's process, all its threads counted."""
    uvloop.run(_rounds(batch_size, draft_count, runs, max_new_tokens))


async def _rounds(batch_size: int, draft_count: int, runs: int, max_new_tokens: int) -> None:
    async with instant_models() as (draft, target):
        flags = ["--draft", draft, "--target", target, "--log-level", "error"]
        flags += ["--batch-size", str(batch_size), "--draft-count", str(draft_count)]
        async with running_service("coordinator", flags) as service, Client(service.address) as client:
            process = coordinator_process()
            request = GenerationRequest(Text("one two three"), max_new_tokens=max_new_tokens)
            for number in range(runs + 1):  # the first warms up
                spent = await _one_run(client, process, request, 2 * batch_size)
                if number:
                    console.print(spent)


async def _one_run(client: Client, process: psutil.Process, request: GenerationRequest, count: int) -> str:
    before, cpu, began = (await client.describe()).statistics, cpu_s(process), time.perf_counter()
    requests = [replace(request, seed=seed) for seed in range(count)]
    await asyncio.gather(*(client.complete(one) for one in requests))
    spent_s, elapsed_s = cpu_s(process) - cpu, time.perf_counter() - began
    after = (await client.describe()).statistics
    round_count = after.round_count - before.round_count
    return (
        f"{1e3 * spent_s / round_count:.2f} ms of CPU a round, {round_count} rounds, "
        f"{(after.committed_count - before.committed_count) / elapsed_s:.0f} tokens/s"
    )


if __name__ == "__main__":
    app()
