"""Text of a bench result: throughput and speed-ups, where a round's time goes, and the conditions."""

from collections.abc import Sequence

from paceline.measure.bench import grid
from paceline.measure.bench.grid import SystemSpec
from paceline.measure.bench.result import BenchResult
from paceline.measure.bench.summary import RoundSummary, Summary, peers_of, summaries
from paceline.measure.contention import MAX_OTHERS_SHARE, MAX_SLOWDOWN
from paceline.measure.tables import markdown_table


def bench_report(result: BenchResult) -> str:
    """Return the whole report in Markdown."""
    found = summaries(result)
    notes = [
        f"{result.target_model} with {result.draft_model}, {result.device}, {result.machine}; {_versions(result)}; "
        f"{result.started_at}.",
        f"{result.prompt_count} prompts of {result.input_file}, {result.prompt_token_count} tokens, at most "
        f"{result.max_new_tokens} new tokens each; medians of up to {result.run_count} runs in turn, after one to warm "
        "up; tokens after an output's end are not counted. A peer without our batch size is compared at 1. "
        f"Lanes of speculation at B > 1: {result.lanes or 'the default'}.",
        f"`quiet`: runs during which others had under {MAX_OTHERS_SHARE:.0%} of the processors and a probe took under "
        f"{MAX_SLOWDOWN} times its least; what was spoiled was repeated, and does not count where a quiet run is. "
        "`threads`: those a peer was fastest with, of all it was tried with.",
        f"`equal`: outputs equal to the first system's of the dtype: {_firsts(result)}. `of floor`: the least "
        f"time for the bytes that rounds must read ({_bandwidth(result)} GB/s measured) over the time they took.",
    ]
    parts = ["\n".join(notes), throughput_table(found, peers_of(result), result.prompt_count)]
    if any(one.rounds for one in found):
        parts += ["Where a round's time goes:", round_table(found)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def throughput_table(found: Sequence[Summary], peers: Sequence[str], prompt_count: int) -> str:
    header = [
        "system",
        "B",
        "tokens/s",
        *(f"x {_title(kind)}" for kind in peers),
        *("x own B=1", "accepted", "tokens/row", "slots filled", "of floor", "equal", "threads", "quiet"),
    ]
    return markdown_table(header, [_row(one, peers, prompt_count) for one in found])


def _row(one: Summary, peers: Sequence[str], prompt_count: int) -> list[str]:
    return [
        one.system,
        str(one.batch_size),
        f"{one.tokens_per_s:.0f}",
        *(_number(one.speedups.get(kind), ".2f") for kind in peers),
        _number(one.speedup_over_own_single, ".2f"),
        *(_round_cells(one.rounds) if one.rounds else [""] * 4),
        f"{one.equal_count} of {prompt_count}",
        "" if one.threads is None else str(one.threads),
        f"{one.quiet_count} of {one.run_count}",
    ]


def _round_cells(rounds: RoundSummary) -> list[str]:
    return [
        _number(rounds.acceptance, ".1%"),
        f"{rounds.tokens_per_row:.2f}",
        f"{rounds.occupancy:.0%}",
        _number(rounds.floor_share, ".0%"),
    ]


def round_table(found: Sequence[Summary]) -> str:
    """Return a table of our systems: milliseconds of a round and of its floor, and the shares of its parts."""
    ours = [(one, one.rounds) for one in found if one.rounds]
    names = list(ours[0][1].time_shares)
    rows = [
        [
            one.system,
            str(one.batch_size),
            f"{rounds.round_ms:.1f}",
            _number(rounds.floor_ms, ".1f"),
            *(f"{rounds.time_shares[name]:.1%}" for name in names),
        ]
        for one, rounds in ours
    ]
    return markdown_table(["system", "B", "ms/round", "floor ms", *names], rows)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _title(kind: str) -> str:
    return f"{grid.TITLES[kind]}, fixed" if kind == grid.ASSISTED_FIXED else grid.TITLES[kind]


def _firsts(result: BenchResult) -> str:
    """Name the first system of each dtype, with which the others of that dtype are compared."""
    firsts: dict[str, SystemSpec] = {}
    for one in result.measured:
        firsts.setdefault(one.spec.precision.dtype, one.spec)
    return "; ".join(f"{spec.label} at B = {spec.batch_size}" for spec in firsts.values())


def _versions(result: BenchResult) -> str:
    return ", ".join(f"{name} {number}" for name, number in result.versions.items())


def _bandwidth(result: BenchResult) -> str:
    return f"{result.floors[0].bandwidth_bytes_per_s / 1e9:.1f}" if result.floors else "no"
