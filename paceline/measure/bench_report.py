"""A bench result as text: throughput and speed-ups, where a round's time goes, what it was measured on."""

from collections.abc import Sequence

from paceline.measure import grid
from paceline.measure.result import BenchResult, SystemResult
from paceline.measure.tables import markdown_table

PEERS = (grid.HUGGING_FACE, grid.ASSISTED, grid.ASSISTED_FIXED, grid.LOOKUP, grid.LLAMA_CPP)


def bench_report(result: BenchResult) -> str:
    """The whole of it in Markdown."""
    first = result.measured[0]
    notes = [
        f"{result.target_model} with {result.draft_model}, {result.device}, {result.machine}; {_versions(result)}; "
        f"{result.started_at}.",
        f"{result.prompt_count} prompts of {result.input_file}, {result.prompt_token_count} tokens, at most "
        f"{result.max_new_tokens} new tokens each; medians of up to {result.run_count} runs in turn, after one to warm "
        "up; tokens after an output's end are not counted. A peer without our batch size is compared at 1.",
        f"`equal`: outputs equal to those of {first.spec.label} at B = {first.spec.batch_size}. `of floor`: the least "
        f"time for the bytes that rounds must read ({_bandwidth(result)} GB/s measured) over the time they took.",
    ]
    parts = ["\n".join(notes), throughput_table(result)]
    if any(one.rounds for one in result.measured):
        parts += ["Where a round's time goes:", round_table(result)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def throughput_table(result: BenchResult) -> str:
    peers = [kind for kind in PEERS if any(one.spec.kind == kind for one in result.measured)]
    header = [
        "system",
        "B",
        "tokens/s",
        *(f"x {_title(kind)}" for kind in peers),
        *("x own B=1", "accepted", "tokens/row", "slots filled", "of floor", "equal"),
    ]
    return markdown_table(header, [_row(result, one, peers) for one in result.measured])


def _row(result: BenchResult, system: SystemResult, peers: Sequence[str]) -> list[str]:
    rate, spec, rounds = system.tokens_per_s, system.spec, system.rounds
    single = result.own_single(spec)
    floor_share = result.floor_share(system)
    return [
        spec.label,
        str(spec.batch_size),
        f"{rate:.0f}",
        *(_times(rate, result.find(kind, spec)) if spec.is_ours else "" for kind in peers),
        _times(rate, single) if spec.batch_size > 1 else "",
        f"{rounds.acceptance:.1%}" if rounds and rounds.acceptance is not None else "",
        f"{rounds.tokens_per_row:.2f}" if rounds else "",
        f"{rounds.occupancy:.0%}" if rounds else "",
        f"{floor_share:.0%}" if floor_share is not None else "",
        f"{result.prompt_count - system.mismatch_count} of {result.prompt_count}",
    ]


def _times(rate: float, other: SystemResult | None) -> str:
    return f"{rate / other.tokens_per_s:.2f}" if other else ""


def round_table(result: BenchResult) -> str:
    """Shares of the rounds' time, of our systems."""
    ours = [(one, one.rounds) for one in result.measured if one.rounds]
    names = list(ours[0][1].seconds)
    rows = [
        [
            one.spec.label,
            str(one.spec.batch_size),
            f"{1e3 * sum(rounds.seconds.values()) / rounds.round_count:.1f}",
            *(f"{rounds.time_shares[name]:.1%}" for name in names),
        ]
        for one, rounds in ours
    ]
    return markdown_table(["system", "B", "ms/round", *names], rows)


def _title(kind: str) -> str:
    return f"{grid.TITLES[kind]}, fixed" if kind == grid.ASSISTED_FIXED else grid.TITLES[kind]


def _versions(result: BenchResult) -> str:
    return ", ".join(f"{name} {number}" for name, number in result.versions.items())


def _bandwidth(result: BenchResult) -> str:
    return f"{result.floors[0].bandwidth_bytes_per_s / 1e9:.1f}" if result.floors else "no"
