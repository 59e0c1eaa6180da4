"""Tables and plots about heads, beside the paper's figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.heads import paper
from benchmarks.heads.accuracy import Accuracy
from benchmarks.heads.exact import Exactness
from benchmarks.heads.served import BOTH, PLAIN, SERVICE, Served
from paceline.engine.heads.reading import KINDS
from paceline.measure.figures import new_figure, save_figure
from paceline.measure.tables import markdown_table

ABLATION = ("clover", "without attention decoder", "nor regression", "medusa")
"""From the whole to nothing, a part less each time."""
STEPS = {"medusa": "nor augmenting block: medusa"}
"""What tables call steps that have another name by themselves."""
BLOCKS = ("clover", "block of attention alone", "block of an MLP alone", "without augmenting block")
COLORS = {
    "medusa": "#d1495b",
    "clover": "#0b6e4f",
    "clover2": "#2a9d8f",
    "eagle": "#1b4965",
    SERVICE: "#c98a1b",
    BOTH: "#6d597a",
}


def accuracy_table(found: Mapping[str, Accuracy]) -> str:
    """Return what each kind and variant gets right."""
    count = max((len(one.top_5) for one in found.values()), default=0)
    places = range(1, count + 1)
    header = ["heads", "M", *(f"top 1, {n}" for n in places), *(f"top 5, {n}" for n in places), "extra tokens"]
    rows = [
        [
            name,
            f"{one.parameter_count / 1e6:.2f}",
            *(f"{100 * share:.1f}" for share in one.likeliest),
            *(f"{100 * share:.1f}" for share in one.top_5),
            f"{one.extra_tokens:.2f}",
        ]
        for name, one in found.items()
    ]
    return markdown_table(header, rows)


def ablation_table(found: Mapping[str, Accuracy]) -> str:
    """Return what each step of the ablation loses of the top-5 accuracy, and what forms of the block gain."""
    rows = [
        [STEPS.get(name, name), *_points(_difference(found, before, name)), *_points(paper.LOSSES[name])]
        for before, name in zip(ABLATION, ABLATION[1:], strict=False)
        if before in found and name in found
    ]
    if {"clover", "medusa"} <= set(found):
        total = _difference(found, "clover", "medusa")
        rows.append(["clover over medusa", *_points(total), *_points(paper.TOP_5_OVER_MEDUSA)])
    none = BLOCKS[-1]
    rows += [
        [
            f"{'whole block' if name == 'clover' else name}, over none",
            *_points(_difference(found, name, none)),
            *_points(paper.BLOCKS[name]),
        ]
        for name in BLOCKS[:-1]
        if name in found and none in found
    ]
    header = ["percentage points", "1", "2", "3", "paper 1", "paper 2", "paper 3"]
    return markdown_table(header, rows)


def _difference(found: Mapping[str, Accuracy], better: str, worse: str) -> list[float]:
    pairs = zip(found[better].top_5, found[worse].top_5, strict=True)
    return [100 * (one - other) for one, other in pairs]


def _points(values: Sequence[float]) -> list[str]:
    return [f"{value:.1f}" for value in values]


def served_table(results: Sequence[Served]) -> str:
    """Return speed by batch size, over plain decoding's at the same size."""
    plain = {one.batch_size: one.tokens_per_s for one in results if one.system == PLAIN}
    header = ["system", "B", "tokens/s", "x plain", "extra tokens", "paper x plain", "equal", "quiet"]
    rows = [
        [
            one.system,
            str(one.batch_size),
            f"{one.tokens_per_s:.0f}",
            f"{one.tokens_per_s / plain[one.batch_size]:.2f}",
            "" if one.system == PLAIN else f"{one.extra_tokens:.2f}",
            _paper_ratio(one.system, one.batch_size),
            f"{one.equal_count} of {one.prompt_count}",
            f"{one.quiet_count} of {len(one.runs)}",
        ]
        for one in results
    ]
    return markdown_table(header, rows)


def _paper_ratio(system: str, batch_size: int) -> str:
    if system == PLAIN or system not in paper.TOKENS_PER_S or batch_size not in paper.BATCH_SIZES:
        return ""
    return f"{_paper_ratios(system)[paper.BATCH_SIZES.index(batch_size)]:.2f}"


def _paper_ratios(system: str) -> list[float]:
    pairs = zip(paper.TOKENS_PER_S[system], paper.TOKENS_PER_S[PLAIN], strict=True)
    return [one / plain for one, plain in pairs]


def exact_table(results: Sequence[Exactness]) -> str:
    """Return how many outputs of each kind equal plain decoding's."""
    header = ["heads", "precision", "B", "temperature", "equal", "extra tokens"]
    rows = [
        [
            *(one.kind, one.precision, str(one.batch_size), f"{one.temperature:g}"),
            f"{one.equal_count} of {one.prompt_count}",
            f"{one.extra_tokens:.2f}",
        ]
        for one in results
    ]
    return markdown_table(header, rows)


def plot_accuracy(found: Mapping[str, Accuracy], path: Path) -> None:
    """Plot top-5 accuracy by place: the kinds, and the ablation."""
    figure = new_figure(10.4, 4.2)
    kinds, ablation = figure.subplots(1, 2, sharey=True)
    for axes, names, title in ((kinds, tuple(KINDS), "kinds"), (ablation, ABLATION, "Clover, a part less each time")):
        shades = iter(("#0b6e4f", "#74a57f", "#edae49", "#d1495b"))
        for name in (one for one in names if one in found):
            shares = [100 * share for share in found[name].top_5]
            color = COLORS[name] if names is not ABLATION else next(shades)
            axes.plot(range(1, len(shares) + 1), shares, marker="o", color=color, label=name)
        axes.set_title(title, loc="left", fontsize=12)
        axes.set_xlabel("place")
        axes.set_xticks([1, 2, 3])
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    kinds.set_ylabel("% of tokens among the 5 likeliest")
    save_figure(figure, path)


def plot_served(results: Sequence[Served], path: Path) -> None:
    """Plot speed over plain decoding's by batch size, the paper's dashed."""
    plain = {one.batch_size: one.tokens_per_s for one in results if one.system == PLAIN}
    figure = new_figure(9, 4.6)
    axes = figure.subplots()
    for system in dict.fromkeys(one.system for one in results if one.system != PLAIN):
        own = [one for one in results if one.system == system]
        ratios = [one.tokens_per_s / plain[one.batch_size] for one in own]
        axes.plot(
            [one.batch_size for one in own], ratios, marker="o", color=COLORS.get(system, "#8d99ae"), label=system
        )
        if system in paper.TOKENS_PER_S:
            label = f"{system}, paper (7 B)"
            axes.plot(
                paper.BATCH_SIZES, _paper_ratios(system), linestyle="--", color=COLORS[system], alpha=0.6, label=label
            )
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set_xscale("log", base=2)
    sizes = sorted({*plain, *paper.BATCH_SIZES})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size")
    axes.set_ylabel("x plain decoding")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    save_figure(figure, path)
