"""`paceline generate`: one prompt or conversation, streamed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.connection import Connection, connected, missing_sources, with_connection_flags
from paceline.cli.consoles import print_json, words_console
from paceline.cli.conversation import ConversationFlags, with_conversation_flags
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
    read_text,
    run_async,
    teller,
    with_cluster_flags,
    with_drafting_flags,
    with_flags,
    with_sampling_flags,
)
from paceline.errors import InvalidRequest
from paceline.process.cluster_plan import ClusterOptions
from paceline.types import (
    ClusterDescription,
    GenerationFinish,
    GenerationRequest,
    ResponseFormat,
    SamplingParameters,
    Text,
)


@dataclass(frozen=True)
class FormatFlags:
    """Flags that say what the output must look like."""

    json_schema: Annotated[
        str | None,
        typer.Option(help="JSON Schema that the output follows, as an object or in a file of this name. Unset: none."),
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole output matches. Unset: none.")
    ] = None
    grammar: Annotated[
        Path | None, typer.Option(help="File with a grammar in Lark's notation that the output follows. Unset: none.")
    ] = None

    def response_format(self) -> ResponseFormat | None:
        """Return what a request says. Raise InvalidRequest for a file that cannot be read, and for an empty form."""
        schema = self.json_schema
        if schema and not schema.lstrip().startswith("{"):
            schema = read_text("json_schema", Path(schema))
        given = {
            "json_schema": schema,
            "regex": self.regex,
            "grammar": None if self.grammar is None else read_text("grammar", self.grammar),
        }
        for field, text in given.items():
            if text == "":  # what asks for no form is a flag that is not given
                raise InvalidRequest(f"--{field.replace('_', '-')} is empty; give a form or no such flag", field=field)
        form = ResponseFormat(*(text or "" for text in given.values()))
        return None if form == ResponseFormat() else form


with_format_flags = with_flags("form", FormatFlags, FormatFlags)


@with_cluster_flags
@with_connection_flags
@with_conversation_flags
@with_drafting_flags
@with_format_flags
@with_sampling_flags
def command(
    prompt: Annotated[
        str | None, typer.Argument(help="What to continue or answer. Unset: the conversation of --messages.")
    ] = None,
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
    form: FormatFlags,
    conversation: ConversationFlags,
    connection: Connection,
    options: ClusterOptions,
) -> None:
    """Stream the answer to one prompt, or to a conversation."""
    asked = partial(
        GenerationRequest,
        max_new_tokens=max_new_tokens,
        stop_strings=tuple(stop or ()),
        max_draft_count=draft_limit(speculation, options),
        sampling=sampling,
        seed=seed,
        drafting=drafting.options(),
        predicted_output=Text(read_text("prediction", prediction)) if prediction else None,
        response_format=form.response_format(),
    )
    given = conversation.prompt(prompt, chat)

    def request(cluster: ClusterDescription) -> GenerationRequest:
        return asked(as_prompt(given, chat, cluster) if isinstance(given, str) else given)

    run_async(_generate(connection, options, request, timeout_s, as_json=as_json))


async def _generate(
    connection: Connection,
    options: ClusterOptions,
    make_request: Callable[[ClusterDescription], GenerationRequest],
    timeout_s: float | None,
    *,
    as_json: bool,
) -> None:
    console = words_console(stderr=True, soft_wrap=True)
    async with connected(connection, options, tell=teller(console)) as (client, cluster):
        request, began_s = make_request(cluster), time.perf_counter()
        has_prediction = request.predicted_output is not None
        if missing := missing_sources(request.drafting, cluster, has_prediction=has_prediction):
            console.print(missing, style="yellow")
        if as_json:
            completion = await client.complete(request, timeout_s=timeout_s)
            print_json(answer_fields(completion))
            return
        async for piece in client.generate(request, timeout_s=timeout_s):
            print("".join(token.text for token in piece.tokens), end="", flush=True)
            if piece.finish:
                print()
                elapsed_s = time.perf_counter() - began_s
                console.print(_summary(request, piece.finish, elapsed_s), style="dim")


def _summary(request: GenerationRequest, finish: GenerationFinish, elapsed_s: float) -> str:
    usage = finish.usage
    seed = f", seed {finish.seed}" if request.sampling.temperature else ""
    return (
        f"{usage.output_count} tokens in {usage.round_count} rounds and {elapsed_s:.2f} s "
        f"({usage.output_count / max(elapsed_s, 1e-9):.0f} tokens/s), "
        f"{usage.accepted_count} of {usage.drafted_count} draft tokens accepted{by_source(usage.sources)}{seed}"
    )
