"""Tables for a terminal: a waterfall of one request and a summary of the hops of many."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from paceline.observe.report.analysis import HOPS, HopSummary, RequestRound, RequestTrace, drafts_by_source

STYLES = {
    "queued": "bright_black",
    "waiting": "bright_black",
    "coordinator": "blue",
    "draft wire": "cyan",
    "draft queue": "red",
    "draft execute": "green",
    "verify wire": "cyan",
    "verify queue": "red",
    "verify execute": "yellow",
    "other": "white",
}
LEGEND = {
    "waiting": "wait",
    "coordinator": "coordinator",
    "draft wire": "wire",
    "draft queue": "queue",
    "draft execute": "draft",
    "verify execute": "verify",
}
SHOWN = ("waiting", "coordinator", *(hop for hop in HOPS if " " in hop))
SOURCE_LETTERS = {"draft": "d", "suffix": "s", "prediction": "p", "heads": "h"}
COLUMNS_WIDTH = 68
"""Width of all columns except the bar, in cells."""
LEAST_BAR_CELLS = 12
LEAST_WIDTH = COLUMNS_WIDTH + LEAST_BAR_CELLS
"""Least width of a waterfall. A narrower terminal wraps lines, because cut figures would be useless."""


def waterfall(request: RequestTrace, width: int) -> Table:
    """Return a table with one row per round: its start, its hops in milliseconds, its tokens and its place in time."""
    code = request.span.attributes.get("rpc.response.status_code", "")
    legend = Text.assemble(*((f"█{word} ", STYLES[hop]) for hop, word in LEGEND.items()))
    sources = sorted({source for one in request.rounds for source in one.sources})
    legend.append("".join(f"{_letter(source)} {source} " for source in sources))
    title = f"request {request.span.trace_id}: {1e3 * request.latency_s:.0f} ms, {code}"
    table = Table(title=title, caption=legend, box=None, padding=(0, 1, 0, 0))
    table.add_column("at", justify="right")
    cells = max(LEAST_BAR_CELLS, width - COLUMNS_WIDTH)
    table.add_column(min_width=cells)
    for hop in SHOWN:
        name = {"waiting": "wait", "coordinator": "own"}.get(hop, hop.replace(" ", "\n").replace("execute", "exec"))
        table.add_column(name, justify="right", style=STYLES[hop], no_wrap=True)
    table.add_column("acc.", justify="right", no_wrap=True)
    table.add_column("B", justify="right", no_wrap=True)
    for one in request.rounds:
        table.add_row(
            f"{1e3 * _offset_s(request, one):.0f}",
            _bar(request, one, cells),
            *(_milliseconds(one.hops_s[hop]) for hop in SHOWN),
            f"{one.accepted_count}/{one.drafted_count}{_letters(one)}",
            str(one.span.attributes.get("paceline.group_size", f"{one.round_count} rounds")),
        )
    return table


def _letters(one: RequestRound) -> str:
    """Return the letters of the sources that drafted in a round, or in the later rounds."""
    letters = "".join(_letter(source) for source in sorted(one.sources))
    return f" {letters}" if letters else ""


def _letter(source: str) -> str:
    return SOURCE_LETTERS.get(source, "?")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 0.01 else f"{1e3 * seconds:.0f}"


def _offset_s(request: RequestTrace, one: RequestRound) -> float:
    """Return the seconds from the request's start to the round's. Both are spans of the coordinator."""
    return (one.span.start_ns - request.span.start_ns) / 1e9


def _bar(request: RequestTrace, one: RequestRound, cells: int) -> Text:
    """Return the request's whole time as a bar. A cell has the style of the round's hop at the middle of its time.

    A round too short to cover the middle of a cell fills the cell that it ends in.
    """
    cell_s = max(request.latency_s, 1e-9) / cells
    at_s = began_s = _offset_s(request, one) - one.hops_s["queued"] - one.hops_s["waiting"]
    ends: list[tuple[float, str]] = []
    for hop, seconds in one.hops_s.items():
        at_s += seconds
        ends.append((at_s, STYLES[hop]))
    middles = [(cell + 0.5) * cell_s for cell in range(cells)]
    styles = [next((style for end_s, style in ends if began_s <= middle < end_s), None) for middle in middles]
    if not any(styles):
        styles[min(cells - 1, max(0, int(at_s / cell_s)))] = STYLES["verify execute"]
    return Text.assemble(*(("█", style) if style else " " for style in styles))


def hop_table(summaries: Sequence[HopSummary], requests: Sequence[RequestTrace]) -> Table:
    round_count = sum(one.round_count for request in requests for one in request.rounds)
    table = Table(title=f"{len(requests)} requests, {round_count} rounds of theirs; milliseconds a round")
    table.add_column("hop")
    for name in ("P50", "P90", "P99", "of latency"):
        table.add_column(name, justify="right")
    for one in summaries:
        times = (f"{1e3 * seconds:.2f}" for seconds in (one.p50_s, one.p90_s, one.p99_s))
        name = f"{one.hop} (a request)" if one.hop == "other" else one.hop
        table.add_row(Text(name, STYLES[one.hop]), *times, f"{one.share:.1%}")
    return table


def source_table(requests: Sequence[RequestTrace]) -> Table | None:
    """Return a table of the draft tokens by source; None if spans tell none."""
    sums = drafts_by_source(requests)
    if not sums:
        return None
    table = Table(title="draft tokens by source")
    table.add_column("source")
    for name in ("drafted", "accepted", "share"):
        table.add_column(name, justify="right")
    for source, drafts in sums.items():
        share = f"{drafts.accepted_count / drafts.drafted_count:.1%}" if drafts.drafted_count else ""
        table.add_row(source, str(drafts.drafted_count), str(drafts.accepted_count), share)
    return table
