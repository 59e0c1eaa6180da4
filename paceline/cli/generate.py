"""`paceline generate`: one prompt, streamed."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.connection import Connection, connected, with_connection_flags
from paceline.cli.options import (
    Chat,
    DraftingFlags,
    MaxNewTokens,
    Seed,
    Speculation,
    TimeoutS,
    answer_fields,
    as_prompt,
    by_source,
    draft_limit,
    run_async,
    teller,
    with_cluster_flags,
    with_drafting_flags,
    with_sampling_flags,
)
from paceline.errors import InvalidRequest
from paceline.process.launcher import ClusterOptions
from paceline.types import ClusterDescription, GenerationFinish, GenerationRequest, SamplingParameters, Text


@with_cluster_flags
@with_connection_flags
@with_drafting_flags
@with_sampling_flags
def command(
    prompt: Annotated[str, typer.Argument(help="What to continue or answer.")],
    max_new_tokens: MaxNewTokens = 256,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the output; may be repeated.")] = None,
    speculation: Speculation = True,
    chat: Chat = None,
    seed: Seed = None,
    timeout_s: TimeoutS = None,
    prediction: Annotated[
        Path | None,
        typer.Option(help="File with the output that you expect: where it is right, tokens come faster. Unset: none."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, at the end.")] = False,
    *,
    sampling: SamplingParameters,
    drafting: DraftingFlags,
    connection: Connection,
    options: ClusterOptions,
) -> None:
    """Stream the answer to one prompt."""
    limit = draft_limit(speculation, options)
    drafting_options, predicted_output = drafting.options(), _prediction(prediction)

    def request(cluster: ClusterDescription) -> GenerationRequest:
        return GenerationRequest(
            as_prompt(prompt, chat, cluster),
            max_new_tokens=max_new_tokens,
            stop_strings=tuple(stop or ()),
            max_draft_count=limit,
            sampling=sampling,
            seed=seed,
            drafting=drafting_options,
            predicted_output=predicted_output,
        )

    run_async(_generate(connection, options, request, timeout_s, as_json=as_json))


def _prediction(path: Path | None) -> Text | None:
    if path is None:
        return None
    try:
        # With the file's own line ends: an output may have any.
        return Text(path.read_bytes().decode())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prediction {path} cannot be read: {error}", field="prediction") from error


async def _generate(
    connection: Connection,
    options: ClusterOptions,
    make_request: Callable[[ClusterDescription], GenerationRequest],
    timeout_s: float | None,
    *,
    as_json: bool,
) -> None:
    async with connected(connection, options, tell=teller(Console(stderr=True))) as (client, cluster):
        request, began_s = make_request(cluster), time.perf_counter()
        if as_json:
            completion = await client.complete(request, timeout_s=timeout_s)
            print(json.dumps(answer_fields(completion), ensure_ascii=False))
            return
        async for piece in client.generate(request, timeout_s=timeout_s):
            print("".join(token.text for token in piece.tokens), end="", flush=True)
            if piece.finish:
                print()
                elapsed_s = time.perf_counter() - began_s
                Console(stderr=True, highlight=False).print(_summary(request, piece.finish, elapsed_s), style="dim")


def _summary(request: GenerationRequest, finish: GenerationFinish, elapsed_s: float) -> str:
    usage = finish.usage
    seed = f", seed {finish.seed}" if request.sampling.temperature else ""
    return (
        f"{usage.output_count} tokens in {usage.round_count} rounds and {elapsed_s:.2f} s "
        f"({usage.output_count / max(elapsed_s, 1e-9):.0f} tokens/s), "
        f"{usage.accepted_count} of {usage.drafted_count} draft tokens accepted{by_source(usage.sources)}{seed}"
    )
