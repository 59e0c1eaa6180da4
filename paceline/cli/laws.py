"""`paceline laws`: laws of drafts, fitted to measured points."""

from math import isfinite
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.consoles import words_console
from paceline.cli.options import comma_counts
from paceline.errors import InvalidRequest
from paceline.laws.drafts import Draft, DraftLaws, RoundTimes, best_choice
from paceline.laws.fitting import Estimate
from paceline.laws.points import MOST_LAYERS, MOST_TOKENS, read_points
from paceline.simulate.saved_costs import read_costs

app = typer.Typer(no_args_is_help=True, help="Laws of drafts, fitted to measured points.", rich_markup_mode=None)


@app.callback()
def laws() -> None:
    """Laws of drafts, fitted to measured points."""


@app.command("fit")
def fit_laws(
    points: Annotated[Path, typer.Argument(help="JSON list of depth, token_count, acceptance, train_s and step_s.")],
    depth: Annotated[
        int | None, typer.Option(min=1, max=MOST_LAYERS, help="Layers of a draft to foresee; needs --tokens.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, max=MOST_TOKENS, help="Tokens that it would be trained on.")
    ] = None,
    budget_s: Annotated[float | None, typer.Option(min=1, help="Seconds of training: which draft is best?")] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Costs that `paceline simulate --save-costs` wrote: which count is best?")
    ] = None,
    costs_depth: Annotated[
        int, typer.Option(min=1, max=MOST_LAYERS, help="Layers of the draft that those costs are of.")
    ] = 2,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes to choose counts for.")] = "1,8,32",
) -> None:
    """Fit acceptance to depth and training tokens. Foresee drafts, and what pays at which batch."""
    if (depth is None) != (tokens is None):
        raise InvalidRequest("--depth and --tokens name a draft together; give both or neither")
    if budget_s is not None and not isfinite(budget_s):
        raise InvalidRequest(f"--budget-s is {budget_s}; give seconds", field="budget_s")
    console = words_console()
    known = DraftLaws(read_points(points))
    _show_law(console, known)
    if depth and tokens:
        _show_drafts(console, "foreseen", [known.draft(depth, tokens)])
    most = max(one.token_count for one in known.used)
    drafts = known.affordable(budget_s) if budget_s else [known.draft(one, most) for one in known.depths]
    if budget_s:
        _show_drafts(console, f"{budget_s:g} s of training", drafts)
    if costs:
        times = RoundTimes(read_costs(costs), known, costs_depth)
        _show_choices(console, drafts, comma_counts("--batch-sizes", batch_sizes), times)


def _show_law(console: Console, known: DraftLaws) -> None:
    law = known.acceptance
    names = ("", " ln(tokens)", " ln(depth)", " ln(tokens) ln(depth)")
    parts = [f"{_shown(one)}{name}" for one, name in zip(law.coefficients, names, strict=False)]
    console.print(f"acceptance = {' + '.join(parts)}")
    console.print(f"R2 {law.r_squared:.3f}, {len(known.used)} points, each within {law.deviation:.3f} on average")
    if isfinite(law.left_out_error):
        console.print(f"each point foreseen by the others: within {law.left_out_error:.3f}")
    for one in known.held_out:
        found = known.draft(one.depth, one.token_count).acceptance
        console.print(
            f"held out: depth {one.depth}, {one.token_count} tokens: {one.acceptance:.3f}, foreseen {_shown(found)}"
        )


def _show_drafts(console: Console, title: str, drafts: list[Draft]) -> None:
    table = Table("depth", "training tokens", "acceptance", title=title)
    for one in drafts:
        table.add_row(str(one.depth), f"{one.token_count:.0f}", _shown(one.acceptance))
    console.print(table)


def _show_choices(console: Console, drafts: list[Draft], batch_sizes: tuple[int, ...], times: RoundTimes) -> None:
    table = Table("batch", "depth", "draft count", "tokens/s", title="what pays most, in one lane")
    for batch_size in batch_sizes:
        best = best_choice(drafts, batch_size, times)
        table.add_row(str(batch_size), str(best.draft.depth), str(best.draft_count), f"{best.tokens_per_s:.0f}")
    console.print(table)


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ± {estimate.margin:.3f}"
