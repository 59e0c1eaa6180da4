"""Benchmarks without services: what they make of the passes they kept."""

from benchmarks import builtin_pair, draft_lengths, scheduling
from paceline.launcher import ClusterOptions
from paceline.measure.contention import Contention
from paceline.measure.rounds import RoundUse
from paceline.measure.system import Measured
from paceline.types import ClusterStatistics

QUIET, SPOILED = Contention(0.0, 1.0), Contention(0.5, 1.0)
ROUNDS = RoundUse(verified_row_count=10, committed_count=30, drafted_count=50, accepted_count=20)
COUNTED = ClusterStatistics(
    round_count=10, round_counts_by_group_size=((1, 10),), committed_count=30, drafted_count=50, accepted_count=20
)


def measured(tokens_per_s: int, contention: Contention = QUIET, rounds: RoundUse = ROUNDS) -> Measured:
    return Measured([[1] * tokens_per_s], 1.0, rounds, contention)


def cells(table: str) -> list[dict[str, str]]:
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_a_spoiled_pass_counts_in_no_median_of_the_built_in_pair() -> None:
    spoiled = measured(9, SPOILED, RoundUse())
    found = builtin_pair.summary(
        ClusterOptions(draft_count="5"),
        {"plain": [measured(20), spoiled], "speculative": [measured(50), spoiled, spoiled]},
    )
    assert (found["plain_tokens_per_s"], found["speculative_tokens_per_s"], found["speedup"]) == (20, 50, 2.5)
    assert found["acceptance"] == 0.4
    assert found["quiet_runs"] == {"plain": 1, "speculative": 1}


def test_a_spoiled_pass_counts_in_no_median_of_a_policy() -> None:
    row = scheduling.row_of("eqspec", [measured(9, SPOILED), measured(50), measured(9, SPOILED)], COUNTED, True)
    assert (row["tokens_per_s"], row["quiet_runs"]) == (50, 1)


def test_a_ratio_of_draft_lengths_is_of_two_quiet_passes_where_there_are_such_two() -> None:
    others = {name: [measured(10)] * 3 for name in (draft_lengths.PLAIN, *draft_lengths.FIXED)}
    best = {"5": [measured(100), measured(100), measured(20, SPOILED)]}
    auto = {draft_lengths.AUTO: [measured(10, SPOILED), measured(90), measured(95)]}
    table = draft_lengths.table({"some": others | best | auto, "busy": others | best | {"auto": auto["auto"][:1] * 3}})
    some, busy = cells(table)
    assert (some["5"], some["auto"], some["of best"], some["quiet"]) == ("100", "92", "0.90", "19 of 21")
    assert (busy["auto"], busy["of best"], busy["quiet"]) == ("10", "0.10", "17 of 21")
