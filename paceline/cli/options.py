"""Options that several commands take, and how a command reaches a cluster."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

import typer

from paceline.client import Client
from paceline.launcher import ClusterOptions, running_cluster
from paceline.types import ClusterDescription, Prompt, Text, UserMessage

Result = TypeVar("Result")

TargetModel = Annotated[str, typer.Option(help="Checkpoint directory, or builtin:target.")]
DraftModel = Annotated[str, typer.Option(help="Checkpoint directory, or builtin:draft.")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="auto takes what the checkpoint says.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Most sequences in a round.")]
DraftCount = Annotated[int, typer.Option(min=0, max=64, help="Draft tokens a round and sequence.")]
Address = Annotated[
    str | None, typer.Option(help="HOST:PORT of a running coordinator. Unset: start services of its own.")
]
Speculation = Annotated[bool, typer.Option("--speculation/--no-speculation", help="Off: the target decodes plainly.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Put prompts into the chat template, or not. Unset: where the model has one."),
]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens of output.")]


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a command's work. SIGTERM ends it as Ctrl-C does: orderly, with no service left behind."""

    async def cancellable() -> Result:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


@asynccontextmanager
async def connected(address: str | None, options: ClusterOptions) -> AsyncIterator[tuple[Client, ClusterDescription]]:
    """Yield a client of the coordinator at `address`, or of a cluster that lives as long as the block."""
    if address is not None:
        async with Client(address) as client:
            yield client, await client.describe()
        return
    async with running_cluster(options) as addresses, Client(addresses.coordinator) as client:
        yield client, await client.describe()


def as_prompt(text: str, chat: bool | None, cluster: ClusterDescription) -> Prompt:
    use_template = cluster.target.has_chat_template if chat is None else chat
    return UserMessage(text) if use_template else Text(text)


def draft_limit(speculation: bool) -> int | None:
    """What `max_draft_count` of a request should be."""
    return None if speculation else 0
