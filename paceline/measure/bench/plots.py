"""Plots of a bench result: throughput over batch size, and where a round's time goes."""

from pathlib import Path
from typing import Any

from paceline.measure.bench.result import BenchResult, SystemResult
from paceline.measure.figures import new_figure, save_figure

OUR_COLORS = ("#0b6e4f", "#2a9d8f", "#74a57f", "#1b4965", "#5fa8d3", "#8d99ae")
PEER_COLORS = ("#d1495b", "#edae49", "#9c6644", "#6d597a", "#b56576")
PART_COLORS = {
    "draft": "#c98a1b",
    "verify": "#0b6e4f",
    "realignment": "#d1495b",
    "wire": "#3d7ea6",
    "queue": "#8d99ae",
    "coordinator": "#6d597a",
}
LEAST_LABELLED_PERCENT = 5


def plot_throughput(result: BenchResult, path: Path) -> None:
    """Plot tokens a second over batch size, one line for each system; peers that decode one at a time are points."""
    figure = new_figure(9, 5.2)
    axes = figure.subplots()
    lines: dict[str, list[SystemResult]] = {}
    for system in result.measured:
        lines.setdefault(system.spec.label, []).append(system)
    ours, peers = iter(OUR_COLORS * 9), iter(PEER_COLORS * 9)
    for label, systems in sorted(lines.items(), key=lambda line: -max(one.tokens_per_s for one in line[1])):
        is_ours = systems[0].spec.is_ours
        axes.plot(
            [one.spec.batch_size for one in systems],
            [one.tokens_per_s for one in systems],
            color=next(ours if is_ours else peers),
            marker="o" if is_ours else "s",
            linestyle="-" if is_ours else "--" if len(systems) > 1 else "none",
            linewidth=2.4 if is_ours else 1.8,
            label=label,
        )
    sizes = sorted({one.spec.batch_size for one in result.measured})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"Throughput: {_models(result)}", loc="left", fontsize=12, parse_math=False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=10)
    _caption(figure, result)
    save_figure(figure, path)


def plot_rounds(result: BenchResult, path: Path) -> None:
    """Plot the shares of a round's time, one bar for each system of ours. Write nothing when no system has rounds."""
    ours = [(one, one.rounds) for one in result.measured if one.rounds]
    if not ours:
        return
    figure = new_figure(9, 1.6 + 0.42 * len(ours))
    axes = figure.subplots()
    names = [f"{one.spec.label}, B = {one.spec.batch_size}" for one, _ in ours]
    left = [0.0] * len(ours)
    for part, color in PART_COLORS.items():
        shares = [100 * rounds.time_shares[part] for _, rounds in ours]
        if not any(shares):
            continue
        bars = axes.barh(names, shares, left=left, color=color, label=part, height=0.68)
        labels = [f"{share:.0f} %" if share >= LEAST_LABELLED_PERCENT else "" for share in shares]
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    for place, (_, rounds) in enumerate(ours):
        length_ms = 1e3 * sum(rounds.seconds.values()) / rounds.round_count
        axes.text(101, place, f"{length_ms:.1f} ms a round", va="center", fontsize=9, color="#444444")
    axes.invert_yaxis()
    axes.set_xlim(0, 118)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.set_title(f"Where a round's time goes: {_models(result)}", loc="left", fontsize=12, pad=28, parse_math=False)
    axes.legend(frameon=False, ncols=6, loc="lower left", bbox_to_anchor=(0.0, 1.0), fontsize=10, handlelength=1.0)
    save_figure(figure, path)


def _models(result: BenchResult) -> str:
    return f"{_name(result.target_model)} with {_name(result.draft_model)}"


def _name(model: str) -> str:
    """Return the last two parts of a path: the last one alone is `target` or `draft` for most pairs."""
    return "/".join(model.rstrip("/").split("/")[-2:])


def _caption(figure: Any, result: BenchResult) -> None:
    figure.supxlabel(
        f"{result.prompt_count} prompts, at most {result.max_new_tokens} new tokens, {result.device}, {result.machine}",
        fontsize=9,
        color="#666666",
        x=0.01,
        ha="left",
    )
