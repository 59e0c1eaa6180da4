"""Tables of a load run for a terminal, during the run and at its end."""

from rich.table import Table

from paceline.cli.options import by_source
from paceline.measure.load.load import LoadLog, Outcome
from paceline.measure.load.summary import LoadSummary, Percentiles

RECENT_S = 5.0
"""Seconds over which current rates are computed."""


def progress_table(log: LoadLog) -> Table:
    """Return one line of counts and current rates."""
    elapsed_s = log.elapsed_s()
    since_s, window_s = max(0.0, elapsed_s - RECENT_S), max(1e-9, min(elapsed_s, RECENT_S))
    # The lists grow in another thread meanwhile; copying them is atomic.
    tokens = sum(count for at_s, count in list(log.token_times) if at_s >= since_s)
    ended = sum(one.ended_s >= since_s and one.outcome is Outcome.COMPLETED for one in list(log.records))
    table = Table("elapsed", "sent", "in flight", "done", "rejected", "failed", "requests/s", "tokens/s")
    table.add_row(
        f"{elapsed_s:.0f} s",
        str(log.sent_count),
        str(log.in_flight_count),
        str(log.count(Outcome.COMPLETED)),
        str(log.count(Outcome.REJECTED)),
        str(log.count(Outcome.FAILED)),
        f"{ended / window_s:.1f}",
        f"{tokens / window_s:.0f}",
    )
    return table


def summary_table(title: str, summary: LoadSummary) -> Table:
    table = Table("", "P50", "P90", "P99", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, percentiles, unit in (
        ("time to first token", summary.first_token_s, "s"),
        ("time per output token", summary.per_token_s, "ms"),
        ("end to end", summary.latency_s, "s"),
        ("queued in the coordinator", summary.queued_s, "s"),
    ):
        table.add_row(name, *_cells(percentiles, unit))
    return table


def _cells(percentiles: Percentiles | None, unit: str) -> list[str]:
    if percentiles is None:
        return ["", "", ""]
    values = (percentiles.p50, percentiles.p90, percentiles.p99)
    return [f"{value:.3f} s" if unit == "s" else f"{1e3 * value:.1f} ms" for value in values]


def summary_lines(summary: LoadSummary) -> list[str]:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in summary.counts.items())
    lines = [
        f"{counts} in {summary.elapsed_s:.1f} s",
        f"{summary.requests_per_s:.2f} requests/s, {summary.tokens_per_s:.0f} tokens/s",
    ]
    if summary.drafted_count:
        share = summary.accepted_count / summary.drafted_count
        lines.append(f"{share:.1%} of draft tokens accepted{by_source(summary.sources)}")
    if summary.good_count is not None:
        sent_count = sum(summary.counts.values())
        lines.append(f"{summary.good_count} of {sent_count} within the objectives, {summary.good_per_s:.2f} requests/s")
    lines += [f"{count} times {error}: {summary.messages[error]}" for error, count in summary.errors.items()]
    if summary.late_s > 0.1:
        lines.append(f"sent up to {summary.late_s:.2f} s late: this sender could not keep up with the rate")
    return lines
