"""The files that a load run writes: JSON and a plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.files import replace_file
from paceline.measure.figures import new_figure, save_figure
from paceline.measure.load.load import Outcome, SentRequest
from paceline.measure.load.summary import PERCENTS, LoadSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_json(path: Path, settings: dict[str, Any], summary: LoadSummary, records: Sequence[SentRequest]) -> None:
    """Write the settings, the summary, and an entry for each request."""
    content = {
        "settings": settings,
        "summary": asdict(summary) | {"good_per_s": summary.good_per_s},
        "requests": [_row(record) for record in sorted(records, key=lambda one: one.planned_s)],
    }
    replace_file(path, json.dumps(content, indent=2) + "\n")


def _row(record: SentRequest) -> dict[str, Any]:
    row: dict[str, Any] = {"planned_s": record.planned_s, "sent_s": record.sent_s, "outcome": record.outcome.value}
    if record.outcome is Outcome.COMPLETED:
        row |= {
            "first_token_s": record.first_token_s,
            "per_token_s": record.per_token_s,
            "latency_s": record.latency_s,
        }
    row["output_count"] = record.output_count
    if record.usage:
        row["usage"] = asdict(record.usage)
    return row | ({"error": record.error} if record.error else {})


def write_plot(path: Path, title: str, summary: LoadSummary, records: Sequence[SentRequest]) -> None:
    """Draw how latencies are distributed, and throughput and load over time, as PNG."""
    figure = new_figure(12, 5)
    figure.suptitle(title, parse_math=False)
    left, right = figure.subplots(1, 2)
    _draw_latencies(left, records, summary)
    _draw_throughput(right, records, summary)
    save_figure(figure, path)


def _draw_latencies(axes: "Axes", records: Sequence[SentRequest], summary: LoadSummary) -> None:
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    series = (
        ("time to first token", [one.first_token_s or 0.0 for one in completed], summary.first_token_s, "tab:blue"),
        ("end to end", [one.latency_s for one in completed], summary.latency_s, "tab:orange"),
    )
    for name, values, percentiles, color in series:
        if percentiles is None:
            continue
        axes.ecdf(values, label=name, color=color, linewidth=2)
        for percent, value in zip(PERCENTS, asdict(percentiles).values(), strict=True):
            axes.plot(value, percent / 100, "o", color=color)
            axes.annotate(
                f"P{percent} {value:.2f} s", (value, percent / 100), textcoords="offset points", xytext=(6, -12)
            )
        axes.legend(loc="lower right")
    axes.set(title="Latency from the planned arrival", xlabel="seconds", ylabel="share of requests", ylim=(0, 1.02))
    # Room for the label of the last percentile.
    axes.set_xlim(0, 1.25 * max((record.latency_s for record in completed), default=1.0))
    axes.grid(alpha=0.3)


def _draw_throughput(axes: "Axes", records: Sequence[SentRequest], summary: LoadSummary) -> None:
    from matplotlib.ticker import MaxNLocator

    width_s = max(1.0, summary.elapsed_s / 60)
    bins = [number * width_s for number in range(int(summary.elapsed_s / width_s) + 2)]
    times, counts = [], []
    for record in records:
        for at_s, count in record.token_times:
            times.append(at_s)
            counts.append(count / width_s)
    axes.hist(times, bins, weights=counts, color="tab:green", alpha=0.5)
    axes.set(title="Over time", xlabel="seconds since the start", ylabel="output tokens a second")
    axes.yaxis.label.set_color("tab:green")
    load = axes.twinx()
    changes = sorted([(one.planned_s, 1) for one in records] + [(one.ended_s, -1) for one in records])
    in_flight = accumulate((change for _, change in changes), initial=0)
    load.step([0.0, *(at_s for at_s, _ in changes)], list(in_flight), where="post", color="tab:gray")
    load.set_ylim(bottom=0)
    load.yaxis.set_major_locator(MaxNLocator(integer=True))
    load.set_ylabel("requests in flight", color="tab:gray")
    rejected = [one.planned_s for one in records if one.outcome is Outcome.REJECTED]
    if rejected:
        load.plot(rejected, [0] * len(rejected), "x", color="tab:red", label=f"{len(rejected)} rejected")
        load.legend(loc="upper right")
