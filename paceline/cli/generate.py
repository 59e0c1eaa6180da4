"""`paceline generate`: one prompt, streamed."""

from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.options import (
    Address,
    Chat,
    MaxNewTokens,
    Speculation,
    as_prompt,
    connected,
    draft_limit,
    run_async,
    with_cluster_flags,
)
from paceline.launcher import ClusterOptions
from paceline.types import GenerationRequest, Usage


@with_cluster_flags
def command(
    prompt: Annotated[str, typer.Argument(help="What to continue or answer.")],
    address: Address = None,
    max_new_tokens: MaxNewTokens = 256,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the output; may be repeated.")] = None,
    speculation: Speculation = True,
    chat: Chat = None,
    *,
    options: ClusterOptions,
) -> None:
    """Stream the answer to one prompt."""
    run_async(_generate(prompt, address, options, chat, max_new_tokens, tuple(stop or ()), draft_limit(speculation)))


async def _generate(
    prompt: str,
    address: str | None,
    options: ClusterOptions,
    chat: bool | None,
    max_new_tokens: int,
    stop_strings: tuple[str, ...],
    max_draft_count: int | None,
) -> None:
    async with connected(address, options) as (client, cluster):
        request = GenerationRequest(
            as_prompt(prompt, chat, cluster),
            max_new_tokens=max_new_tokens,
            stop_strings=stop_strings,
            max_draft_count=max_draft_count,
        )
        async for piece in client.generate(request):
            print("".join(token.text for token in piece.tokens), end="", flush=True)
            if piece.finish:
                print()
                Console(stderr=True, highlight=False).print(_summary(piece.finish.usage), style="dim")


def _summary(usage: Usage) -> str:
    return (
        f"{usage.output_count} tokens in {usage.round_count} rounds, "
        f"{usage.accepted_count} of {usage.drafted_count} draft tokens accepted"
    )
