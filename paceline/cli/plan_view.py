"""A plan for people: tables, and a picture of speed against memory."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from paceline.measure.figures import new_figure, save_figure
from paceline.planning.memory import MIB
from paceline.planning.search import Candidate, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 1 << 30
INT8_WORDS = {"none": "as they are", "draft": "int8 in the draft", "both": "int8"}
COLORS = {"none": "tab:blue", "draft": "tab:purple", "both": "tab:gray"}


def shown_bytes(size_bytes: int) -> str:
    """Return a size in GiB, or in MiB if it is small."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"


def needs_table(title: str, one: Candidate) -> Table:
    """Return what each service needs, part by part."""
    needs = {"target": one.target} | ({"draft": one.draft} if one.draft else {})
    table = Table(title=title)
    for column in ("", *needs):
        table.add_column(column, justify="right" if column else "left")
    for part in ("process", "weights", "kv", "work", "total"):
        name = {"kv": "cache"}.get(part, part)
        table.add_row(name, *(shown_bytes(getattr(need, part)) for need in needs.values()))
    return table


def settings_table(made: Plan, own: Candidate) -> Table:
    """Return the settings that count: what fits, what would be fastest, what needs least, and the user's own."""
    table = Table(title=f"within {shown_bytes(made.budget_bytes)}")
    for column in ("", "memory", "tokens/s", "drafts", "rows", "chunk", "weights"):
        table.add_column(column, justify="left" if column in ("", "weights") else "right")
    named = {"chosen": made.chosen, "fastest": made.best, "least memory": made.bound, "your settings": own}
    for name, one in named.items():
        if one is None:
            table.add_row(name, "nothing fits", style="red")
            continue
        setting = one.setting
        counts = [str(count) for count in (setting.draft_count, setting.row_count, setting.chunk_tokens)]
        speed = f"{one.tokens_per_s:,.0f}"
        table.add_row(name, shown_bytes(one.total_bytes), speed, *counts, INT8_WORDS[setting.int8])
    return table


def write_picture(path: Path, made: Plan, own: Candidate, title: str) -> None:
    """Draw speed against memory: every setting, the frontier, the budget, what was chosen, and the user's settings."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    _draw_settings(axes, made)
    frontier = made.frontier
    axes.step(*_places(frontier), where="post", color="black", linewidth=1.5, label="frontier")
    axes.axvline(made.budget_bytes / GIB, color="tab:red", linestyle="--", label="memory")
    for one, marker, color, name in (
        (made.chosen, "*", "tab:red", "chosen"),
        (own, "D", "tab:orange", "your settings"),
    ):
        if one:
            axes.plot(*_places([one]), marker, color=color, markersize=13 if marker == "*" else 8, label=name)
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="memory of all services, GiB", ylabel="tokens a second")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    save_figure(figure, path)


def _draw_settings(axes: "Axes", made: Plan) -> None:
    for step, words in INT8_WORDS.items():
        if found := [one for one in made.candidates if one.setting.int8 == step]:
            axes.plot(*_places(found), ".", color=COLORS[step], alpha=0.5, rasterized=True, label=f"weights {words}")


def _places(candidates: "list[Candidate]") -> tuple[list[float], list[float]]:
    return [one.total_bytes / GIB for one in candidates], [one.tokens_per_s for one in candidates]
