"""Table and plot of services at a distance."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.distance.result import Comparison, DistanceResult, figures_of
from paceline.measure.contention import MAX_OTHERS_SHARE, MAX_SLOWDOWN
from paceline.measure.figures import new_figure, save_figure
from paceline.measure.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADER = (
    "far",
    "ms",
    "B",
    "T",
    "tokens/s without",
    "tokens/s prepared",
    "ratio",
    "ms/round without",
    "ms/round prepared",
    "rows prepared",
    "accepted/row without",
    "accepted/row prepared",
    "equal",
    "quiet",
)
COLORS = {0.0: "#0b6e4f", 1.0: "#c98a1b"}
"""Colours of lines, by temperature."""


def console_table(result: DistanceResult) -> Table:
    table = Table(title="Services at a distance, without prepared rounds and with them")
    for number, name in enumerate(HEADER):
        table.add_column(name, justify="right" if number else "left")
    for comparison in result.comparisons:
        table.add_row(*_row(comparison))
    return table


def report(result: DistanceResult) -> str:
    """Return the conditions and the table in Markdown."""
    return f"{notes(result)}\n\n{markdown_table(HEADER, [_row(one) for one in result.comparisons])}"


def notes(result: DistanceResult) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    prompt_count = max((one.prompt_count for one in result.comparisons), default=0)
    return "\n".join(
        (
            f"{result.models}, {result.machine}; {versions}; {result.started_at}.",
            f"Up to {prompt_count} prompts of {result.input_file}, at most {result.max_new_tokens} new tokens each; "
            f"medians of up to {result.run_count} runs in turn, after one to warm up.",
            "`far`: the service that is `ms` of round trip away from the coordinator. `prepared`: rounds are prepared "
            "where that is measured to pay. `ratio`: tokens/s prepared over without, the median of neighbouring runs. "
            "`rows prepared`: those that had drafts without waiting for a call.",
            "`equal`: outputs equal to those of the target alone, in every run of both. `quiet`: runs during which "
            f"others had under {MAX_OTHERS_SHARE:.0%} of the processors and a probe took under {MAX_SLOWDOWN} times "
            "its least.",
        )
    )


def _row(one: Comparison) -> list[str]:
    without, prepared = figures_of(one.without), figures_of(one.prepared)
    return [
        one.case.far,
        f"{one.case.round_trip_ms:g}",
        str(one.case.batch_size),
        f"{one.case.temperature:g}",
        f"{without.tokens_per_s:.0f}",
        f"{prepared.tokens_per_s:.0f}",
        f"{one.ratio:.2f}",
        f"{without.round_ms:.1f}",
        f"{prepared.round_ms:.1f}",
        f"{prepared.prepared_share:.0%}",
        f"{without.accepted_per_row:.2f}",
        f"{prepared.accepted_per_row:.2f}",
        f"{one.equal_count} of {one.prompt_count}",
        f"{one.quiet_count} of {len(one.runs)}",
    ]


def plot(result: DistanceResult, path: Path) -> None:
    """Plot tokens a second over the round trip: a column for each far service, a row for each batch size."""
    far = list(dict.fromkeys(one.case.far for one in result.comparisons))
    sizes = list(dict.fromkeys(one.case.batch_size for one in result.comparisons))
    figure = new_figure(5.2 * len(far), 3.6 * len(sizes))
    grid = figure.subplots(len(sizes), len(far), squeeze=False, sharey="row")
    for line, size in zip(grid, sizes, strict=True):
        for axes, service in zip(line, far, strict=True):
            own = [one for one in result.comparisons if (one.case.far, one.case.batch_size) == (service, size)]
            _draw(axes, own)
            axes.set_title(f"{service} at a distance, B = {size}", loc="left", fontsize=12)
        # The row shares its scale, which no longer follows what is drawn once it is set.
        line[0].set_ylim(bottom=0)
        line[0].set_ylabel("tokens per second")
    figure.suptitle(result.models, fontsize=12)
    save_figure(figure, path)


def _draw(axes: "Axes", comparisons: Sequence[Comparison]) -> None:
    delays_ms = sorted({one.case.round_trip_ms for one in comparisons})
    for temperature in dict.fromkeys(one.case.temperature for one in comparisons):
        own = {one.case.round_trip_ms: one for one in comparisons if one.case.temperature == temperature}
        kind = f"T = {temperature:g}" if temperature else "greedy"
        for name, style in (("prepared", "-"), ("without", "--")):
            runs = [getattr(own[delay_ms], name) for delay_ms in delays_ms]
            axes.plot(
                # Far distances would push near ones together.
                range(len(delays_ms)),
                [figures_of(one).tokens_per_s for one in runs],
                color=COLORS[temperature],
                linestyle=style,
                marker="o",
                label=f"{kind}, {name}",
            )
    axes.set_xticks(range(len(delays_ms)), [f"{delay_ms:g}" for delay_ms in delays_ms])
    axes.set_xlabel("ms of round trip")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
