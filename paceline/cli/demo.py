"""`paceline demo`: the three services at work on the built-in pair, and what speculation gains on this machine."""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from paceline.cli.consoles import words_console
from paceline.cli.options import (
    MaxNewTokens,
    as_prompt,
    run_async,
    with_cluster_flags,
)
from paceline.cli.prompts import PROMPTS, SHOWN
from paceline.cli.trace import report
from paceline.client import Client, Completion
from paceline.observe.records import read_spans
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from paceline.tasks import side_by_side
from paceline.types import (
    ClusterDescription,
    DraftSource,
    GenerationRequest,
    OutputPiece,
    OutputToken,
    UserMessage,
    added_up,
)

if TYPE_CHECKING:
    from paceline.measure.peers.reference import HuggingFaceReference

SOURCE_STYLES = {
    DraftSource.DRAFT: ("of the draft service", "green"),
    DraftSource.SUFFIX: ("repeated", "cyan"),
    DraftSource.PREDICTION: ("predicted by the client", "magenta"),
    DraftSource.HEADS: ("of the target's heads", "blue"),
}
"""Words and style of accepted draft tokens by what drafted them."""
OWN_STYLE = "bold yellow"
MAX_NEW_TOKENS, RUNS = 160, 3


@dataclass(frozen=True)
class Measured:
    """One pass over all prompts."""

    completions: list[Completion]
    elapsed_s: float

    @property
    def output_count(self) -> int:
        return sum(completion.finish.usage.output_count for completion in self.completions)

    @property
    def tokens_per_s(self) -> float:
        return self.output_count / self.elapsed_s


@with_cluster_flags
def command(
    max_new_tokens: MaxNewTokens = MAX_NEW_TOKENS,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each kind, alternating; medians are shown.")] = RUNS,
    trace: Annotated[bool, typer.Option("--trace", help="Trace every request, and end with where time went.")] = False,
    *,
    options: ClusterOptions,
) -> None:
    """Stream a few answers, and show what speculation gains. It is compared with plain decoding and Hugging Face."""
    if trace and not options.trace_dir:
        options = replace(options, trace_dir=tempfile.mkdtemp(prefix="paceline-trace-"))
    run_async(show(words_console(), options, max_new_tokens, runs))


async def show(
    console: Console, options: ClusterOptions, max_new_tokens: int = MAX_NEW_TOKENS, runs: int = RUNS
) -> None:
    """Run the demo. The console is the caller's, so that scripts/record can give one that records."""
    options = replace(options, prefix_sharing=False)
    with console.status("starting coordinator, draft service and target service") as status:
        async with (
            running_cluster(options) as addresses,
            Client(addresses.coordinator, shares_stream=True) as client,
        ):
            cluster = await client.describe()
            status.stop()
            _introduce(console, cluster)
            await _stream(console, client, _requests(cluster, max_new_tokens))
            plain_requests = _requests(cluster, max_new_tokens, max_draft_count=0)
            status.start()
            plain: list[Measured] = []
            speculative: list[Measured] = []
            for number in range(runs):
                status.update(f"decoding plainly and speculatively, run {number + 1} of {runs}")
                plain.append(await _measure(client, plain_requests))
                speculative.append(await _measure(client, _requests(cluster, max_new_tokens)))
        reference = await asyncio.to_thread(_reference, options, cluster, max_new_tokens, status)
    console.print(_table(plain, speculative, reference, cluster))
    if options.trace_dir:
        console.print()
        spans = read_spans([f"{options.trace_dir}/*.jsonl"])
        # Requests decoded plainly would hide what drafting costs.
        drafted = [one for one in spans if one.name != "generate" or one.attributes.get("paceline.drafted_count")]
        report(console, drafted, None, Path(options.trace_dir) / "perfetto.json")


def _introduce(console: Console, cluster: ClusterDescription) -> None:
    for role, model in (("target", cluster.target), ("draft", cluster.draft)):
        if model is None:
            words = "none answers yet: plain decoding until one does" if cluster.drafts else "none"
            console.print(f"{role:7} {words}")
            continue
        size = f"{model.parameter_count / 1e6:.1f} M parameters"
        console.print(f"{role:7} {model.model_id}, {model.architecture}, {size}, {model.precision} on {model.device}")
    if cluster.target.heads:
        console.print(f"heads   {cluster.target.heads}, up to {cluster.target.heads_draft_count} drafts, in the target")
    console.print(_legend())


def _legend() -> Text:
    accepted = Text(", ").join(Text(*one) for one in SOURCE_STYLES.values())
    return Text.assemble("accepted draft tokens: ", accepted, "; ", ("the target's own", OWN_STYLE), "\n")


def _styled(token: OutputToken) -> Text:
    """Return a token's text in the colour of its source. An unknown source counts as the draft service."""
    if not token.accepted:
        return Text(token.text, OWN_STYLE)
    source = token.source if token.source in SOURCE_STYLES else DraftSource.DRAFT
    return Text(token.text, SOURCE_STYLES[source][1])


def _requests(
    cluster: ClusterDescription, max_new_tokens: int, max_draft_count: int | None = None
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            as_prompt(prompt, None, cluster), max_new_tokens=max_new_tokens, max_draft_count=max_draft_count
        )
        for prompt in PROMPTS
    ]


async def _measure(client: Client, requests: Sequence[GenerationRequest]) -> Measured:
    began = time.perf_counter()
    completions = await asyncio.gather(*(client.complete(request) for request in requests))
    return Measured(completions, time.perf_counter() - began)


async def _stream(console: Console, client: Client, requests: Sequence[GenerationRequest]) -> None:
    """Generate all at once, which also warms up; print the first in order, the one whose turn it is as it comes.

    The first that fails ends all, and so does Ctrl-C.
    """
    streams: list[asyncio.Queue[OutputPiece]] = [asyncio.Queue() for _ in requests]
    async with side_by_side() as together:
        for request, stream in zip(requests, streams, strict=True):
            together.create_task(_fill(client, request, stream))
        for prompt, stream in zip(SHOWN, streams, strict=False):
            await _print_stream(console, prompt, stream)
        more = len(PROMPTS) - len(SHOWN)
        console.print(f"{more} more answers are measured, not shown.\n")


async def _fill(client: Client, request: GenerationRequest, stream: asyncio.Queue[OutputPiece]) -> None:
    async for piece in client.generate(request):
        stream.put_nowait(piece)


async def _print_stream(console: Console, prompt: str, stream: asyncio.Queue[OutputPiece]) -> None:
    console.print(prompt, style="bold")
    is_over = False
    while not is_over:
        piece = await stream.get()
        for token in piece.tokens:
            console.print(_styled(token), end="")
        is_over = piece.finish is not None
    console.print("\n")


def _reference(
    options: ClusterOptions, cluster: ClusterDescription, max_new_tokens: int, status: Status
) -> list[list[int]]:
    # torch is slow to import, and only this command needs it here.
    from paceline.measure.peers.reference import HuggingFaceReference

    reference = HuggingFaceReference(
        options.target_model, cluster.target.dtype, quantization=cluster.target.quantization or "none"
    )
    outputs = []
    for number, prompt in enumerate(PROMPTS, 1):
        status.update(f"decoding with Hugging Face generate, prompt {number} of {len(PROMPTS)}")
        outputs.append(_reference_output(reference, prompt, cluster, max_new_tokens))
    return outputs


def _reference_output(
    reference: "HuggingFaceReference", prompt: str, cluster: ClusterDescription, max_new_tokens: int
) -> list[int]:
    chat = isinstance(as_prompt(prompt, None, cluster), UserMessage)
    return reference.generate(reference.encode(prompt, chat=chat), max_new_tokens)


def _table(
    plain: Sequence[Measured], speculative: Sequence[Measured], reference: list[list[int]], cluster: ClusterDescription
) -> Table:
    usages = [completion.finish.usage for completion in speculative[0].completions]
    drafted, accepted = sum(u.drafted_count for u in usages), sum(u.accepted_count for u in usages)
    sources = added_up(source for usage in usages for source in usage.sources)
    rounds, output = sum(u.round_count for u in usages), sum(u.output_count for u in usages)
    plain_rate, rate = median(m.tokens_per_s for m in plain), median(m.tokens_per_s for m in speculative)
    outputs = [completion.token_ids for completion in speculative[0].completions]
    plain_outputs = [completion.token_ids for completion in plain[0].completions]
    table = Table(title=f"{len(PROMPTS)} prompts, B = {cluster.batch_size}, {cluster.draft_count} drafts a round")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("speculative", justify="right")
    table.add_row("tokens/s", f"{plain_rate:.0f}", f"{rate:.0f} ({rate / plain_rate:.2f}x)")
    table.add_row("tokens per round and generation", "1.00", f"{output / rounds:.2f}")
    table.add_row("drafts accepted", "", f"{accepted / drafted:.1%}" if drafted else "none drafted")
    for one in sources if len(sources) > 1 else ():
        share = f"{one.accepted_count / one.drafted_count:.1%} of {one.drafted_count}"
        table.add_row(f"  {one.name}", "", share)
    table.add_row("identical to plain decoding", "", _same(outputs, plain_outputs))
    table.add_row("identical to Hugging Face generate", _same(plain_outputs, reference), _same(outputs, reference))
    return table


def _same(outputs: list[list[int]], others: list[list[int]]) -> str:
    return f"{sum(map(list.__eq__, outputs, others))} of {len(outputs)}"
