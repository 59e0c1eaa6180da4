"""`paceline run`: a file of prompts in, a file of outputs out, line for line."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from paceline.cli.connection import Connection, connected, with_connection_flags
from paceline.cli.options import (
    Chat,
    MaxNewTokens,
    Seed,
    Speculation,
    answer_fields,
    as_prompt,
    draft_limit,
    run_async,
    with_cluster_flags,
    with_sampling_flags,
)
from paceline.cli.progress import progress_bar
from paceline.client import Client
from paceline.errors import PacelineError
from paceline.launcher import ClusterOptions
from paceline.prompt_file import InputLine, read_lines
from paceline.types import ClusterDescription, GenerationRequest, SamplingParameters

IN_FLIGHT = 64
"""Prompts sent ahead of their turn: enough to keep any batch full, few enough to leave the queue to others."""


@with_cluster_flags
@with_connection_flags
@with_sampling_flags
def command(
    input_file: Annotated[
        Path, typer.Option("--input", help="JSON lines with `prompt`, or SpecBench's `turns`; -: from stdin.")
    ],
    output_file: Annotated[Path, typer.Option("--output", help="Where the output lines go.")],
    max_new_tokens: MaxNewTokens = 256,
    speculation: Speculation = True,
    chat: Chat = None,
    seed: Seed = None,
    *,
    sampling: SamplingParameters,
    connection: Connection,
    options: ClusterOptions,
) -> None:
    """Answer every prompt of a file. A line that is wrong is reported and the rest still runs."""
    console = Console(stderr=True, highlight=False)
    lines = read_lines(input_file)

    def request(line: InputLine, cluster: ClusterDescription) -> GenerationRequest:
        assert line.prompt is not None
        return GenerationRequest(
            as_prompt(line.prompt, chat, cluster),
            max_new_tokens=max_new_tokens,
            max_draft_count=draft_limit(speculation, options),
            sampling=sampling,
            seed=seed,
        )

    failed_count = run_async(_run(lines, output_file, connection, options, request, console))
    console.print(f"{len(lines) - failed_count} of {len(lines)} lines answered, in {output_file}")
    if failed_count:
        raise typer.Exit(1)


async def _run(
    lines: list[InputLine],
    output_file: Path,
    connection: Connection,
    options: ClusterOptions,
    request: Callable[[InputLine, ClusterDescription], GenerationRequest],
    console: Console,
) -> int:
    """Answer the lines, write their outputs in order as they come, and return how many failed."""
    with _open(output_file) as file:
        async with connected(connection, options) as (client, cluster):

            async def answer(line: InputLine) -> dict[str, Any]:
                if line.error:
                    return _failure(line, line.error)
                try:
                    return await _answer(client, line, request(line, cluster))
                except PacelineError as error:
                    return _failure(line, error.message)

            failed_count = 0
            with progress_bar(console) as progress:
                task = progress.add_task("answering", total=len(lines))
                async for output in _in_order(lines, answer):
                    file.write(json.dumps(output, ensure_ascii=False) + "\n")
                    file.flush()
                    progress.advance(task)
                    if "error" in output:
                        failed_count += 1
                        progress.console.print(f"{output['id']}: {output['error']}", style="red")
            return failed_count


async def _in_order(
    lines: Sequence[InputLine], answer: Callable[[InputLine], Awaitable[dict[str, Any]]]
) -> AsyncIterator[dict[str, Any]]:
    """Yield answers in the order of `lines`, with `IN_FLIGHT` of them under way."""
    pending: deque[asyncio.Future[dict[str, Any]]] = deque()
    for line in lines:
        pending.append(asyncio.ensure_future(answer(line)))
        if len(pending) == IN_FLIGHT:
            yield await pending.popleft()
    while pending:
        yield await pending.popleft()


def _open(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error}", param_hint="--output") from error


async def _answer(client: Client, line: InputLine, request: GenerationRequest) -> dict[str, Any]:
    completion = await client.complete(request)
    answer = {"id": line.id, "prompt": line.prompt, **answer_fields(completion)}
    if not request.sampling.temperature:
        del answer["seed"]
    return answer


def _failure(line: InputLine, message: str) -> dict[str, Any]:
    return {"id": line.id, "prompt": line.prompt, "error": message}
