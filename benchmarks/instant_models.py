"""Services whose models answer at once, so that what is measured is all else.

`instant_models` runs one of each as a process: `python -m benchmarks.instant_models`. Knows nothing of measuring.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import typer
import uvloop

from benchmarks.commands import run_command
from draft_service.servicer import DraftServicer
from paceline.codec.names import DRAFT_SERVICE, TARGET_SERVICE
from paceline.engine.calls import Call
from paceline.engine.model.checkpoint import find_checkpoint, read_tokenizer
from paceline.model_service.servicer import Answering
from paceline.model_service.worker import ModelWorker
from paceline.text import TextCodec, fingerprint
from paceline.types import (
    CacheDescription,
    ModelDescription,
    Prefilled,
    Proposal,
    ProposeRow,
    TokenizerFiles,
    Verdict,
    VerifyOutcome,
    VerifyRow,
)
from paceline.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server
from paceline.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from paceline.wire import Exchanges, running_server, termination
from target_service.servicer import TargetServicer

app = typer.Typer(add_completion=False, help=__doc__)

DRAFTED = (300, 400, 500, 600, 700, 800, 900, 1000)
MAX_LENGTH = 10_000


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


@app.command()
def main(max_length: int = MAX_LENGTH, echo: bool = False, heads_count: int = 0) -> None:
    """Serve both instant models until standard input ends; prints the addresses of the draft, then of the target."""
    uvloop.run(_serve(max_length, echo, heads_count))


async def _serve(max_length: int, echo: bool, heads_count: int) -> None:
    model = NoModel(builtin_tokenizer(), max_length, heads_count)
    drafter = EchoDrafter(model) if echo else InstantDrafter(model)
    verifier = EchoVerifier(model) if echo else HeadsVerifier(model) if heads_count else InstantVerifier(model)
    async with served(drafter) as draft, served(verifier) as target:
        print(draft, target, sep="\n", flush=True)
        await termination(stop_with_stdin=True)


def builtin_tokenizer() -> TokenizerFiles:
    tokenizer = read_tokenizer(find_checkpoint("builtin:target"))
    assert tokenizer is not None
    return tokenizer


@asynccontextmanager
async def served(model: InstantDrafter | InstantVerifier) -> AsyncIterator[str]:
    """Serve a draft or a target without a model; yield the address."""
    kind: Any
    add: Any
    if isinstance(model, InstantDrafter):
        name, kind, add = DRAFT_SERVICE, DraftServicer, add_DraftServiceServicer_to_server
    else:
        name, kind, add = TARGET_SERVICE, TargetServicer, add_TargetServiceServicer_to_server
    with closing(ModelWorker(1)) as worker:
        servicer = kind(model, Answering(worker, Exchanges()))
        async with running_server("127.0.0.1", 0, [name], partial(add, servicer), grace_s=1) as server:
            server.set_serving(True)
            yield server.address


@dataclass(frozen=True)
class ModelServices:
    """Addresses of services in a process of their own; those of several have commas between them."""

    process: psutil.Process
    drafts: str
    targets: str

    @property
    def flags(self) -> tuple[str, ...]:
        """What a coordinator over them is told."""
        return ("--draft", self.drafts, "--target", self.targets)


@asynccontextmanager
async def model_services(module: str, *flags: str) -> AsyncIterator[ModelServices]:
    """Run a module that prints the addresses of drafts, then of targets, and serves until its standard input ends."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *flags, stdin=PIPE, stdout=PIPE)
    assert process.stdin and process.stdout
    try:
        drafts, targets = [(await process.stdout.readline()).decode().strip() for _ in range(2)]
        yield ModelServices(psutil.Process(process.pid), drafts, targets)
    finally:
        process.stdin.close()
        await process.wait()


def instant_models(*flags: str) -> AbstractAsyncContextManager[ModelServices]:
    """Run both instant models."""
    return model_services("benchmarks.instant_models", *flags)


if __name__ == "__main__":
    run_command(app)
