"""`paceline run` with a client that needs no coordinator: it answers with the prompt, unless told otherwise."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from paceline.cli.app import main
from paceline.cli.run import command as run
from paceline.client import Completion
from paceline.errors import PacelineError, PeerUnavailable
from paceline.types import (
    ClusterDescription,
    ClusterStatistics,
    DraftSource,
    FinishReason,
    GenerationFinish,
    GenerationRequest,
    ModelIdentity,
    OutputToken,
    Text,
    Usage,
)
from tests.fakes.model_services import describe

Before = Callable[[str], None]
"""Called with a prompt before its answer; it may raise, or end the process."""


@dataclass
class AnsweringClient:
    before: Before = lambda prompt: None
    is_lost: bool = False
    """True if no coordinator is there."""
    model: str = "target"
    model_digest: str = ""
    endless: str | None = None
    """A prompt that is never answered; None for no such prompt."""
    timeout_s: float | None = None
    """Timeout of the last request."""
    sources: tuple[DraftSource, ...] | None = None
    """Sources that its coordinator has; None: it does not tell."""
    prompts: list[str] = field(default_factory=list)
    """Prompts in the order of their requests."""
    requests: list[GenerationRequest] = field(default_factory=list)

    async def describe(self) -> ClusterDescription:
        if self.is_lost:
            raise PeerUnavailable("no coordinator is there")
        target = replace(describe(self.model), identity=ModelIdentity(self.model_digest))
        return ClusterDescription(target, None, 8, 5, "continuous", 2, 0, 0, ClusterStatistics(), sources=self.sources)

    describe_once = describe

    async def complete(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Completion:
        assert isinstance(request.prompt, Text)
        assert request.model_digest == self.model_digest
        prompt = request.prompt.value
        self.prompts.append(prompt)
        self.requests.append(request)
        self.timeout_s = timeout_s
        self.before(prompt)
        if prompt == self.endless:
            await asyncio.Event().wait()
        finish = GenerationFinish(FinishReason.LENGTH, Usage(1, 1), 0)
        return Completion((OutputToken(len(prompt), prompt.upper(), accepted=False),), finish)


@contextmanager
def answering(client: AnsweringClient) -> Iterator[None]:
    """Connect `paceline run` to this client, whatever its flags."""

    @asynccontextmanager
    async def connected(*_: Any, **__: Any) -> AsyncIterator[tuple[AnsweringClient, ClusterDescription]]:
        yield client, await client.describe()

    patched: AbstractContextManager[object] = patch.object(run, "connected", connected)
    with patched:
        yield


def fails(prompt: str, error: PacelineError) -> Before:
    def before(asked: str) -> None:
        if asked == prompt:
            raise error

    return before


def run_interrupted(prompt: str, number: int, *flags: str) -> None:
    """Run `paceline run` in this process, and send it a signal at this prompt."""
    client = AnsweringClient(lambda asked: os.kill(os.getpid(), number) if asked == prompt else None, endless=prompt)
    sys.argv = ["paceline", "run", *flags]
    with answering(client):
        main()
