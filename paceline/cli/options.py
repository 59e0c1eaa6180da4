"""Options that several commands take, and how a command reaches a cluster."""

import asyncio
import functools
import inspect
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

import typer

from paceline.client import Client
from paceline.launcher import ClusterOptions, running_cluster
from paceline.types import ClusterDescription, Prompt, Text, UserMessage

Result = TypeVar("Result")

Address = Annotated[
    str | None, typer.Option(help="HOST:PORT of a running coordinator. Unset: start services of its own.")
]
Speculation = Annotated[bool, typer.Option("--speculation/--no-speculation", help="Off: the target decodes plainly.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Put prompts into the chat template, or not. Unset: where the model has one."),
]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens of output.")]


@dataclass(frozen=True)
class ClusterFlags:
    """Flags of every command that starts services of its own."""

    target_model: Annotated[str, typer.Option(help="Checkpoint directory, hub id, or builtin:target.")]
    draft_model: Annotated[str, typer.Option(help="Checkpoint directory, hub id, or builtin:draft.")]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="auto takes what the checkpoint says.")
    ]
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto takes cuda where there is one.")]
    kv_memory: Annotated[
        str, typer.Option(help="Most memory for each cache: bytes such as 512MiB, or a share of what is free: 40%.")
    ]
    layout: Annotated[
        Literal["paged", "dense"], typer.Option(help="dense: the paper's padded and realigned rectangle.")
    ]
    numerics: Annotated[
        Literal["fast", "strict"],
        typer.Option(help="strict: in any dtype, speculative output equals plain decoding bit for bit."),
    ]
    batch_size: Annotated[int, typer.Option(min=1, help="Most sequences in a round.")]
    draft_count: Annotated[
        str, typer.Option(help="Draft tokens a round and sequence, 0 to 64; auto: what pays best by measured times.")
    ]
    policy: Annotated[
        Literal["continuous", "eqspec", "exspec"], typer.Option(help="How groups are formed; two are the paper's.")
    ]
    lanes: Annotated[
        int | None, typer.Option(min=1, max=2, help="Groups in flight. Unset: 2, and 1 under the paper's policies.")
    ]


def with_cluster_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags above, which reach it as one argument `options`. Defaults are ClusterOptions' own."""
    signature = inspect.signature(command, eval_str=True)
    defaults = ClusterOptions()
    flags = [
        inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=getattr(defaults, one.name), annotation=one.type
        )
        for one in fields(ClusterFlags)
    ]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        chosen = {flag.name: values.pop(flag.name) for flag in flags}
        command(options=ClusterOptions(**chosen), **values)

    own = [one for name, one in signature.parameters.items() if name != "options"]
    wrapped.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in (*own, *flags)}
    return wrapped


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
