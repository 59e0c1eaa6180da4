"""Text of a bench result: throughput and speed-ups, where a round's time goes, and the conditions."""

from collections.abc import Iterable, Sequence

from paceline.measure.bench import grid
from paceline.measure.bench.grid import SystemSpec
from paceline.measure.bench.result import BenchResult
from paceline.measure.bench.summary import (
    CategorySummary,
    RoundSummary,
    SourceSummary,
    Summary,
    category_summaries,
    compared_kinds,
    summaries,
)
from paceline.measure.contention import MAX_OTHERS_SHARE, MAX_SLOWDOWN
from paceline.measure.tables import markdown_table


def bench_report(result: BenchResult) -> str:
    """Return the whole report in Markdown."""
    found, categories, compared = summaries(result), category_summaries(result), compared_kinds(result)
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
        "`decoding/s`: speed with the prompts' time taken out: the tokens after each output's first over the time that "
        "a run takes longer than a pass in its turn that ends every output at its first token.",
    ]
    parts = ["\n".join(notes), throughput_table(found, compared, result.prompt_count)]
    if any(one.rounds and one.rounds.sources for one in found):
        parts += ["Drafts by source: accepted of drafted tokens, and their share of all output:", source_table(found)]
    if categories:
        parts += [_category_legend(result), category_table(categories, compared)]
    if any(one.rounds for one in found):
        parts += ["Where a round's time goes:", round_table(found)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _category_legend(result: BenchResult) -> str:
    if result.by_category:
        return "By category, each by itself; rounds shared with other categories would tell no speed of one:"
    return "By category, in the runs above (their rounds tell no speed of one category; `--by-category` measures it):"


def throughput_table(found: Sequence[Summary], compared: Sequence[str], prompt_count: int) -> str:
    header = [
        "system",
        "B",
        *_speed_header(compared),
        *("x own B=1", "accepted", "tokens/row", "slots filled", "of floor", "equal", "threads", "quiet"),
    ]
    return markdown_table(header, [_row(one, compared, prompt_count) for one in found])


def _speed_header(compared: Sequence[str]) -> list[str]:
    return ["tokens/s", *(f"x {_title(kind)}" for kind in compared), "decoding/s", "x plain decoding"]


def _speed_cells(one: Summary, compared: Sequence[str]) -> list[str]:
    return [
        f"{one.tokens_per_s:.0f}",
        *(_number(one.speedups.get(kind), ".2f") for kind in compared),
        _number(one.decoding_tokens_per_s, ".0f"),
        _number(one.decoding_speedup, ".2f"),
    ]


def _row(one: Summary, compared: Sequence[str], prompt_count: int) -> list[str]:
    return [
        one.system,
        str(one.batch_size),
        *_speed_cells(one, compared),
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


def source_table(found: Sequence[Summary]) -> str:
    """Return a table of our systems that drafted, with two columns for each source."""
    ours = [(one, one.rounds.sources) for one in found if one.rounds and one.rounds.sources]
    names = _source_names(sources for _, sources in ours)
    header = ["system", "B", *(column for name in names for column in (name, f"output from {name}"))]
    return markdown_table(header, [[one.system, str(one.batch_size), *_cells(names, each)] for one, each in ours])


def _source_names(found: Iterable[Sequence[SourceSummary]]) -> list[str]:
    return list(dict.fromkeys(one.name for sources in found for one in sources))


def _cells(names: Sequence[str], sources: Sequence[SourceSummary]) -> list[str]:
    by_name = {one.name: (f"{one.accepted_count} of {one.drafted_count}", f"{one.output_share:.1%}") for one in sources}
    return [cell for name in names for cell in by_name.get(name, ("", ""))]


def category_table(found: Sequence[CategorySummary], compared: Sequence[str]) -> str:
    """Return a table of our speculative systems by category; with speeds where categories ran by themselves."""
    has_speeds = any(one.alone for one in found)
    names = _source_names(one.rows.sources for one in found)
    header = [
        *("category", "prompts", "system", "B"),
        *((*_speed_header(compared), "equal") if has_speeds else ()),
        *("accepted", "tokens/row", *(f"output from {name}" for name in names)),
    ]
    return markdown_table(header, [_category_row(one, compared, names, has_speeds=has_speeds) for one in found])


def _category_row(
    one: CategorySummary, compared: Sequence[str], names: Sequence[str], *, has_speeds: bool
) -> list[str]:
    shares = {source.name: source.output_share for source in one.rows.sources}
    speeds = [*_speed_cells(one.alone, compared), f"{one.alone.equal_count} of {one.prompt_count}"] if one.alone else []
    lacking = [""] * (len(_speed_header(compared)) + 1) if has_speeds and not one.alone else []
    return [
        *(one.category, str(one.prompt_count), one.system, str(one.batch_size)),
        *speeds,
        *lacking,
        *(_number(one.rows.acceptance, ".1%"), f"{one.rows.tokens_per_row:.2f}"),
        *(_number(shares.get(name), ".1%") for name in names),
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
    if kind == grid.PLAIN:
        return "plain"
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
