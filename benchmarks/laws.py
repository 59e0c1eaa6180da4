"""Laws of drafts beside what was measured: `python -m benchmarks.laws report POINTS.json`, or `counts --data FILE`.

`report` draws the law of acceptance through its points, which `python -m training grid` makes. `counts` asks whether
the draft count that measured costs foresee as best is the best.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.commands import run_command
from benchmarks.questions import Gsm8kFile, encode_questions
from paceline.cli.options import comma_counts
from paceline.client import NO_RETRIES, Client
from paceline.laws.drafts import DraftLaws
from paceline.laws.points import read_points
from paceline.measure.figures import new_figure, save_figure
from paceline.measure.load.load import LoadLog, run_loops
from paceline.measure.load.summary import Objectives, summarize
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from paceline.simulate.measured_rounds import MeasuredRounds
from paceline.simulate.saved_costs import SavedCosts
from paceline.types import DraftingOptions, DraftSource, GenerationRequest, TokenIds
from training import problems

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console(highlight=False)
MOST_DRAFTS = 8
FROM_DRAFT = DraftingOptions(sources=(DraftSource.DRAFT,))
PAPER = (0.08, 0.74)
"""Slopes of accepted tokens a cycle by ln(tokens) and ln(depth) in arXiv 2505.07858; of counts, not of shares."""


@app.command()
def report(points: Path, plot: Path = Path("benchmarks/results/laws.png")) -> None:
    """Show the law of acceptance, and how far it is from cells that were held out."""
    known = DraftLaws(read_points(points))
    law = known.acceptance
    slopes = ", ".join(f"{one.value:.3f} ± {one.margin:.3f}" for one in law.coefficients[1:])
    console.print(f"R2 {law.r_squared:.3f}; slopes by ln(tokens), ln(depth), and both if that helps: {slopes}")
    console.print(f"the paper's slopes, of accepted tokens a cycle: {PAPER[0]} and {PAPER[1]}", style="dim")
    for one in known.held_out:
        error = known.draft(one.depth, one.token_count).acceptance.value - one.acceptance
        console.print(f"held out, depth {one.depth}, {one.token_count} tokens: off by {error:+.3f}")
    _draw(known, plot)


def _draw(known: DraftLaws, path: Path) -> None:
    figure = new_figure(7, 5)
    axes = figure.subplots()
    for number, depth in enumerate(known.depths):
        own = [one for one in (*known.used, *known.held_out) if one.depth == depth]
        tokens = sorted(one.token_count for one in own)
        axes.plot([one.token_count for one in own], [one.acceptance for one in own], "o", color=f"C{number}")
        values = [known.draft(depth, one).acceptance.value for one in tokens]
        axes.plot(tokens, values, color=f"C{number}", label=f"depth {depth}")
    axes.set(xscale="log", xlabel="tokens of training", ylabel="share of right drafts")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)


@app.command()
def counts(
    data: Gsm8kFile,
    draft_model: Annotated[
        list[str] | None, typer.Option(help="Draft to choose; several may be given. Unset: the built-in one")
    ] = None,
    batch_sizes: str = "1,8,32",
    rounds_of_clients: Annotated[int, typer.Option(help="Requests of each client and count")] = 3,
    max_new_tokens: int = 96,
) -> None:
    """Measure every draft and draft count, and compare the best with what costs and acceptance foresee."""
    _, unseen = problems.load(data)
    prompts = encode_questions([one.question for one in unseen], ClusterOptions())
    for batch_size in comma_counts("--batch-sizes", batch_sizes):
        chosen = [prompts[number % len(prompts)] for number in range(max(rounds_of_clients * batch_size, 8))]
        choices: list[Speeds] = []
        for model in draft_model or [ClusterOptions().draft_model]:
            choices += asyncio.run(_speeds(model, chosen, batch_size, max_new_tokens))
        _show(batch_size, choices)


@dataclass(frozen=True)
class Speeds:
    """Tokens a second with a draft and a draft count."""

    draft_model: str
    draft_count: int
    measured: float
    foreseen: float


async def _speeds(
    draft_model: str, prompts: Sequence[tuple[int, ...]], batch_size: int, max_new_tokens: int
) -> list[Speeds]:
    options = ClusterOptions(
        draft_model=draft_model, batch_size=batch_size, lanes=1, draft_count=str(MOST_DRAFTS), prefix_sharing=False
    )
    async with running_cluster(options) as addresses, Client(addresses.coordinator, NO_RETRIES) as client:
        measured: dict[int, float] = {}
        for draft_count in (MOST_DRAFTS, *range(MOST_DRAFTS + 1)):  # the first again: services begin slowly
            log = LoadLog()
            requests = [
                GenerationRequest(TokenIds(one), max_new_tokens, max_draft_count=draft_count, drafting=FROM_DRAFT)
                for one in prompts
            ]
            await run_loops(requests, batch_size, client.generate, log)
            measured[draft_count] = summarize(log.records, Objectives()).tokens_per_s
        saved = SavedCosts.of(await client.describe(include_costs=True))
    predicted = foreseen(saved, batch_size)
    return [Speeds(draft_model, count, measured[count], predicted[count]) for count in sorted(measured)]


def foreseen(saved: SavedCosts, batch_size: int) -> list[float]:
    """Return tokens a second of rounds of one lane with 0, 1, ... drafts, by measured costs and acceptance."""
    (acceptance,) = (one for one in saved.costs.acceptances if one.source is DraftSource.DRAFT)
    rounds, tokens, reached, found = MeasuredRounds(saved), 0.0, 1.0, list[float]()
    places = zip(acceptance.right_counts, acceptance.compared_counts, strict=True)
    chances = [1.0, *(right / compared for right, compared in places)]
    for draft_count in range(MOST_DRAFTS + 1):
        reached *= chances[draft_count] if draft_count < len(chances) else 0.0
        tokens += reached
        seconds = rounds.verify_s(batch_size, draft_count) + rounds.draft_s(batch_size, draft_count)
        found.append(batch_size * tokens / seconds)
    return found


def loss_of_foreseen(choices: Sequence[Speeds]) -> tuple[Speeds, float]:
    """Return the choice that is foreseen as the best, and what it gives less than the measured best, as a share.

    Without drafts all drafts' runs are of one choice: the best of several runs of it would be their luck.
    """
    drafting = [one for one in choices if one.draft_count]
    plain = [one for one in choices if not one.draft_count]
    different = [*drafting, *([_joined(plain)] if plain else [])]
    chosen = max(different, key=lambda one: one.foreseen)
    return chosen, 1 - chosen.measured / max(one.measured for one in different)


def _joined(plain: Sequence[Speeds]) -> Speeds:
    measured, foreseen = mean(one.measured for one in plain), mean(one.foreseen for one in plain)
    return Speeds("any model", 0, measured, foreseen)


def _show(batch_size: int, choices: Sequence[Speeds]) -> None:
    table = Table("draft", "draft count", "measured", "foreseen", title=f"tokens a second at B = {batch_size}")
    for one in choices:
        table.add_row(one.draft_model, str(one.draft_count), f"{one.measured:.0f}", f"{one.foreseen:.0f}")
    console.print(table)
    chosen, loss = loss_of_foreseen(choices)
    console.print(
        f"foreseen best: {chosen.draft_count} drafts of {chosen.draft_model}, {loss:.1%} below the measured best"
    )


if __name__ == "__main__":
    run_command(app)
