"""`paceline run`: a file of prompts in, a file of outputs out, line for line."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from paceline.cli.connection import Connection, connected, missing_sources, with_connection_flags
from paceline.cli.consoles import words_console
from paceline.cli.options import (
    Chat,
    DraftingFlags,
    MaxNewTokens,
    Seed,
    Speculation,
    TimeoutS,
    answer_fields,
    as_prompt,
    draft_limit,
    run_async,
    teller,
    with_cluster_flags,
    with_drafting_flags,
    with_sampling_flags,
)
from paceline.cli.progress import progress_bar
from paceline.cli.run.partial_outputs import STDOUT, PartialOutputs
from paceline.client import Client
from paceline.errors import InvalidRequest, MessageTooLarge, PacelineError, PeerUnavailable
from paceline.files import check_distinct
from paceline.process.cluster_plan import ClusterOptions
from paceline.prompt_file import STDIN, InputLine, read_lines
from paceline.tasks import side_by_side
from paceline.types import (
    ClusterDescription,
    DraftingOptions,
    GenerationRequest,
    ModelDescription,
    SamplingParameters,
    Text,
)

IN_FLIGHT = 64
"""Prompts in progress at once: enough to keep any batch full, few enough to leave the queue to others."""


@dataclass(frozen=True)
class RunPlan:
    """The settings for the request of each line."""

    max_new_tokens: int
    chat: bool | None
    seed: int | None
    timeout_s: float | None
    max_draft_count: int | None
    sampling: SamplingParameters
    drafting: DraftingOptions

    def request(self, prompt: str, prediction: str | None, cluster: ClusterDescription) -> GenerationRequest:
        return GenerationRequest(
            as_prompt(prompt, self.chat, cluster),
            max_new_tokens=self.max_new_tokens,
            max_draft_count=self.max_draft_count,
            sampling=self.sampling,
            seed=self.seed,
            # One model must answer all lines.
            model_digest=cluster.target.identity.model_digest,
            drafting=self.drafting,
            predicted_output=None if prediction is None else Text(prediction),
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings that answers depend on besides prompt and model. No answer depends on its drafts."""
        own = ("max_new_tokens", "max_draft_count", "chat", "seed")
        return {name: getattr(self, name) for name in own} | asdict(self.sampling)


@with_cluster_flags
@with_connection_flags
@with_drafting_flags
@with_sampling_flags
def command(
    input_file: Annotated[
        Path,
        typer.Option(
            "--input",
            help="JSON lines with `prompt`, or SpecBench's `turns`, and with `prediction` or not; -: from stdin.",
        ),
    ],
    output_file: Annotated[
        Path, typer.Option("--output", help="Where the output lines go, once all are there; -: to stdout.")
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what OUTPUT.partial lacks, which an interrupted run left.")
    ] = False,
    max_new_tokens: MaxNewTokens = 256,
    speculation: Speculation = True,
    chat: Chat = None,
    seed: Seed = None,
    timeout_s: TimeoutS = None,
    *,
    sampling: SamplingParameters,
    drafting: DraftingFlags,
    connection: Connection,
    options: ClusterOptions,
) -> None:
    """Answer every prompt of a file. A line that is wrong is reported and the rest still runs."""
    console = words_console(stderr=True)
    lines = read_lines(input_file)
    output_file = STDOUT if output_file == STDIN else output_file
    limit = draft_limit(speculation, options)
    plan = RunPlan(max_new_tokens, chat, seed, timeout_s, limit, sampling, drafting.options())
    check_distinct(input_file, output_file)
    partial = PartialOutputs(output_file, {"input": _digest(lines)} | plan.settings(), resume=resume)
    try:
        failed_count = run_async(_run(lines, plan, partial, connection, options, console))
    finally:
        partial.close()
    console.print(f"{len(lines) - failed_count} of {len(lines)} lines answered, in {output_file}", soft_wrap=True)
    if failed_count:
        raise typer.Exit(1)


def _digest(lines: Sequence[InputLine]) -> str:
    return hashlib.sha256(json.dumps([(line.id, line.prompt) for line in lines]).encode()).hexdigest()


async def _run(
    lines: Sequence[InputLine],
    plan: RunPlan,
    partial: PartialOutputs,
    connection: Connection,
    options: ClusterOptions,
    console: Console,
) -> int:
    """Answer the lines that have no answer yet, write the output, and return how many failed."""
    async with connected(connection, options, tell=teller(console)) as (client, cluster):
        partial.answered_by(_model_of(cluster.target))
        has_prediction = any(line.prediction is not None for line in lines)
        if missing := missing_sources(plan.drafting, cluster, has_prediction=has_prediction):
            console.print(missing, style="yellow", soft_wrap=True)
        try:
            with progress_bar(console) as progress:
                run = _Run(plan, client, cluster, partial, progress, len(lines))
                todo = iter([(number, line) for number, line in enumerate(lines) if number not in partial])
                async with side_by_side() as group:
                    for _ in range(IN_FLIGHT):
                        group.create_task(run.answer_all(todo))
            partial.publish(run.failures, again=run.again)
        finally:
            if partial.is_kept:
                console.print(
                    f"{len(partial)} of {len(lines)} lines are answered in {partial.path}: the same command with "
                    "--resume goes on from there",
                    style="yellow",
                    soft_wrap=True,
                )
    return len(run.failures)


def _model_of(target: ModelDescription) -> dict[str, Any]:
    """Return the identity of the model that answers: its digest, or its name and numerics without one."""
    if digest := target.identity.model_digest:
        return {"model_digest": digest}
    return {"model": target.model_id, "dtype": target.dtype, "numerics": target.numerics}


class _Run:
    """The lines in progress."""

    def __init__(
        self,
        plan: RunPlan,
        client: Client,
        cluster: ClusterDescription,
        partial: PartialOutputs,
        progress: Progress,
        line_count: int,
    ) -> None:
        self.failures: dict[int, dict[str, Any]] = {}
        self.again = False
        """True when a failed line may succeed in another run."""
        self._plan, self._client, self._cluster, self._partial = plan, client, cluster, partial
        self._progress = progress
        self._task = progress.add_task("answering", total=line_count, completed=len(partial))

    async def answer_all(self, lines: Iterator[tuple[int, InputLine]]) -> None:
        """Answer lines until there are no more. Several tasks share one iterator."""
        for number, line in lines:
            try:
                answer = await self._answer(line)
            except (InvalidRequest, MessageTooLarge) as error:
                self._fail(number, line, error)
            except PacelineError as error:
                if isinstance(error, PeerUnavailable) and not await self._has_coordinator():
                    raise  # every other line would fail as well
                self._fail(number, line, error)
                self.again = True
            else:
                self._partial.add(number, answer)
            self._progress.advance(self._task)

    async def _answer(self, line: InputLine) -> dict[str, Any]:
        if line.prompt is None:
            raise InvalidRequest(line.error or "")
        request = self._plan.request(line.prompt, line.prediction, self._cluster)
        completion = await self._client.complete(request, timeout_s=self._plan.timeout_s)
        answer = {"id": line.id, "prompt": line.prompt, **answer_fields(completion)}
        if not request.sampling.temperature:
            del answer["seed"]
        return answer

    async def _has_coordinator(self) -> bool:
        """Return whether a coordinator answers now. The failed call has already waited for one."""
        with suppress(PeerUnavailable):
            await self._client.describe_once()
            return True
        return False

    def _fail(self, number: int, line: InputLine, error: PacelineError) -> None:
        self.failures[number] = {"id": line.id, "prompt": line.prompt, "error": error.message}
        self._progress.console.print(f"{line.id}: {error.message}", style="red", markup=False, soft_wrap=True)
