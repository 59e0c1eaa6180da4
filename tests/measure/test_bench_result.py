"""What a bench keeps of its runs, and what its tables and plots tell of them."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.measure.bench import grid
from paceline.measure.bench.grid import SystemSpec
from paceline.measure.bench.plots import plot_rounds, plot_throughput
from paceline.measure.bench.report import bench_report, category_table, round_table, source_table, throughput_table
from paceline.measure.bench.result import BenchResult, Floor, PromptPass, Run, SystemResult, bench_result_from_json
from paceline.measure.bench.summary import category_summaries, compared_kinds, summaries, to_json
from paceline.measure.contention import Contention
from paceline.measure.equivalence.agreement import Mismatch
from paceline.measure.equivalence.precision import Precision
from paceline.measure.rounds import RoundUse, RowUse
from paceline.measure.tables import markdown_table
from paceline.types import DraftSource, PassTraffic, SourceUsage

ROUNDS = RoundUse(
    round_count=10,
    slot_count=80,
    filled_slot_count=60,
    verified_row_count=50,
    committed_count=200,
    drafted_count=250,
    accepted_count=150,
    context_token_count=5000,
    sources=(SourceUsage(DraftSource.DRAFT, "small", 200, 130), SourceUsage(DraftSource.SUFFIX, "", 50, 20)),
    draft_s=1.0,
    verify_s=2.0,
    wire_s=0.5,
    queue_s=0.25,
    coordinator_s=0.25,
)


def test_the_floor_is_weights_once_a_round_drafts_once_a_draft_and_the_cached_tokens() -> None:
    floor = Floor("auto", 1000.0, PassTraffic(100, 2), PassTraffic(10, 1))
    drafts_a_row = 200 / 50  # tokens that the suffix index drafted read no weights
    assert floor.seconds(ROUNDS) == ((10 * 100 + 5000 * 2) + drafts_a_row * (10 * 10 + 5000 * 1)) / 1000


def spec(kind: str, batch_size: int, draft_count: str = "") -> SystemSpec:
    return SystemSpec(
        kind, batch_size, Precision("auto"), "continuous" if kind == grid.SPECULATIVE else "", draft_count
    )


def run(
    tokens_per_s: float,
    rounds: RoundUse | None = None,
    mismatches: tuple[Mismatch, ...] = (),
    others_share: float = 0.0,
) -> Run:
    return Run(10.0, round(10 * tokens_per_s), rounds, mismatches, Contention(others_share, 1.0))


def result() -> BenchResult:
    mismatch = Mismatch("7", "qa", 3, 5, 6)
    return BenchResult(
        *("builtin:target", "builtin:draft", "cpu", "prompts.jsonl", 24, 700, 64, "two cores", "2026-01-01T00:00:00"),
        versions={"torch": "2"},
        run_count=3,
        floors=(Floor("auto", 2e4, PassTraffic(100, 2), PassTraffic(10, 1)),),
        systems=(
            SystemResult(
                spec(grid.HUGGING_FACE, 1), (run(90), run(110), run(100), run(40, others_share=0.5)), threads=2
            ),
            SystemResult(spec(grid.ASSISTED, 1), (run(200),)),
            SystemResult(spec(grid.SPECULATIVE, 1, "5"), (run(300, ROUNDS),)),
            SystemResult(spec(grid.HUGGING_FACE, 8), (run(400),)),
            SystemResult(spec(grid.SPECULATIVE, 8, "5"), (run(1200, ROUNDS), run(1300, ROUNDS, (mismatch,)))),
            SystemResult(spec(grid.PLAIN, 8)),
        ),
    )


def test_a_result_survives_its_json_which_has_every_figure_of_the_tables() -> None:
    text = to_json(result())
    assert bench_result_from_json(text) == result()
    ours = json.loads(text)["summaries"][-1]
    assert (ours["system"], ours["batch_size"], ours["tokens_per_s"]) == ("Paceline, 5 drafts", 8, 1250)
    assert ours["speedups"] == {"hf": 3.125, "hf-assisted": 6.25}
    assert ours["rounds"]["time_shares"]["verify"] == 0.5
    assert ours["rounds"]["floor_ms"] < ours["rounds"]["round_ms"]


def test_what_others_spoiled_counts_in_no_figure_where_a_quiet_run_is() -> None:
    """Rounds, their floor and their time came from all runs, disturbed or not."""
    quiet, floor = run(300, ROUNDS), result().floors
    slow = replace(ROUNDS, verify_s=90.0, accepted_count=0)
    spoiled = replace(run(30, slow, others_share=0.5), elapsed_s=100.0)

    def figures(*runs: Run) -> dict[str, Any]:
        system = SystemResult(spec(grid.SPECULATIVE, 1, "5"), runs)
        (one,) = summaries(replace(result(), systems=(system,), floors=floor))
        return asdict(replace(one, quiet_count=0, run_count=0))

    assert figures(quiet, spoiled) == figures(quiet)
    assert figures(spoiled) != figures(quiet)


def test_an_output_that_differs_counts_in_a_spoiled_run_too() -> None:
    mismatch = Mismatch("7", "qa", 3, 5, 6)
    system = SystemResult(spec(grid.PLAIN, 1), (run(300), run(300, None, (mismatch,), others_share=0.5)))
    assert system.mismatch_count == 1


def test_ours_are_compared_with_plain_decoding_and_every_peer_that_was_measured() -> None:
    systems = tuple(SystemResult(spec(kind, 1), (run(100),)) for kind in grid.KINDS)
    (ours,) = (one for one in summaries(replace(result(), systems=systems)) if one.system == "Paceline")
    assert set(ours.speedups) == set(grid.KINDS) - {grid.SPECULATIVE}


def table_of(text: str) -> list[dict[str, str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_plain_decoding_of_the_same_numerics_is_compared_with() -> None:
    strict, fast = Precision("bfloat16"), Precision("bfloat16", "fast")
    plain = [replace(spec(grid.PLAIN, 8), precision=one) for one in (strict, fast)]
    ours = replace(spec(grid.SPECULATIVE, 8, "5"), precision=fast)
    systems = (SystemResult(plain[0], (run(100),)), SystemResult(plain[1], (run(200),)))
    found = replace(result(), systems=(*systems, SystemResult(ours, (run(300),)))).find(grid.PLAIN, ours)
    assert found == systems[1]


def test_decoding_alone_is_what_a_pass_takes_beyond_its_prompts() -> None:
    """Of plain decoding's 1,000 tokens in 10 s, 24 tokens and 6 s are the prompts'; a spoiled pass does not count."""
    passes = (PromptPass(6.0, Contention(0.0, 1.0)), PromptPass(9.0, Contention(0.5, 1.0)))
    plain = SystemResult(spec(grid.PLAIN, 8), (run(100),), passes)
    ours = SystemResult(spec(grid.SPECULATIVE, 8, "5"), (run(200),), (PromptPass(5.0),))
    peer = SystemResult(spec(grid.HUGGING_FACE, 8), (run(50),))
    found = {one.system: one for one in summaries(replace(result(), systems=(peer, plain, ours)))}
    assert found["Paceline, plain"].decoding_tokens_per_s == (1000 - 24) / (10 - 6)
    assert found["Paceline, plain"].decoding_speedup is None
    assert found["Paceline, 5 drafts"].decoding_tokens_per_s == (2000 - 24) / (10 - 5)
    assert found["Paceline, 5 drafts"].decoding_speedup == (1976 / 5) / (976 / 4)
    assert found["HF generate"].decoding_tokens_per_s is None


def test_a_pass_no_longer_than_its_prompts_tells_no_speed_of_decoding() -> None:
    system = SystemResult(spec(grid.PLAIN, 8), (run(100),), (PromptPass(11.0),))
    assert system.decoding_tokens_per_s(24) is None


def test_drafts_are_told_by_source_with_the_share_of_output_that_came_from_each() -> None:
    found = summaries(replace(result(), systems=result().systems[:3]))
    (row,) = table_of(source_table(found))
    assert row == {
        "system": "Paceline, 5 drafts",
        "B": "1",
        "draft small": "130 of 200",
        "output from draft small": "65.0%",
        "suffix": "20 of 50",
        "output from suffix": "10.0%",
    }
    assert "Drafts by source" not in bench_report(replace(result(), systems=result().systems[:2]))


def test_two_passes_of_rounds_add_up_by_source() -> None:
    both = ROUNDS + ROUNDS
    assert (both.round_count, both.committed_count, both.draft_s) == (20, 400, 2.0)
    assert both.sources == (
        SourceUsage(DraftSource.DRAFT, "small", 400, 260),
        SourceUsage(DraftSource.SUFFIX, "", 100, 40),
    )


def by_category() -> BenchResult:
    """A result with rows by category, before the categories ran by themselves."""
    qa = RowUse(10, 20, 30, 10, sources=(SourceUsage(DraftSource.SUFFIX, "", 30, 10),))
    rag = RowUse(10, 40, 30, 30, sources=(SourceUsage(DraftSource.DRAFT, "small", 30, 30),))
    rows = replace(run(300, ROUNDS), categories={"qa": qa, "rag": rag})
    systems = (SystemResult(spec(grid.PLAIN, 8), (run(200),)), SystemResult(spec(grid.SPECULATIVE, 8, "5"), (rows,)))
    return replace(result(), systems=systems, categories={"qa": 16, "rag": 8})


def test_rounds_that_categories_share_tell_their_acceptance_and_no_speed() -> None:
    found = category_summaries(by_category())
    assert [(one.category, one.prompt_count, one.rows.tokens_per_row, one.alone) for one in found] == [
        ("qa", 16, 2.0, None),
        ("rag", 8, 4.0, None),
    ]
    qa, rag = table_of(category_table(found, [grid.PLAIN]))
    assert (qa["accepted"], qa["output from suffix"], qa["output from draft small"]) == ("33.3%", "50.0%", "")
    assert (rag["accepted"], rag["output from suffix"], rag["output from draft small"]) == ("100.0%", "", "75.0%")
    assert "tokens/s" not in qa
    assert "By category" not in bench_report(result())


def test_a_category_by_itself_tells_its_speed_beside_plain_decoding() -> None:
    mixed = by_category()
    plain = SystemResult(spec(grid.PLAIN, 8), (run(100),))
    rows = {"rag": RowUse(10, 30, 30, 20)}
    mismatch = Mismatch("7", "rag", 3, 5, 6)
    ours = SystemResult(spec(grid.SPECULATIVE, 8, "5"), (replace(run(150, ROUNDS, (mismatch,)), categories=rows),))
    measured = replace(mixed, by_category={"rag": (plain, ours)})
    qa, rag = table_of(category_table(category_summaries(measured), compared_kinds(measured)))
    assert (rag["tokens/s"], rag["x plain"], rag["tokens/row"], rag["equal"]) == ("150", "1.50", "3.00", "7 of 8")
    assert (qa["tokens/s"], qa["x plain"], qa["tokens/row"], qa["equal"]) == ("", "", "2.00", "")
    assert bench_result_from_json(to_json(measured)) == measured
    assert "each by itself" in bench_report(measured)
    assert "tell no speed" in bench_report(mixed)


def test_the_table_tells_medians_speed_ups_and_mismatches() -> None:
    rows = table_of(throughput_table(summaries(result()), compared_kinds(result()), 24))
    assert [row["tokens/s"] for row in rows] == ["100", "200", "300", "400", "1250"]
    ours = rows[-1]
    assert ours["system"] == "Paceline, 5 drafts"
    assert (ours["x HF generate"], ours["x HF assisted"], ours["x own B=1"]) == ("3.12", "6.25", "4.17")
    assert (ours["accepted"], ours["tokens/row"], ours["slots filled"]) == ("60.0%", "4.00", "75%")
    assert ours["of floor"] == "16%"
    assert ours["equal"] == "23 of 24"
    assert rows[0]["equal"] == "24 of 24"
    assert [row["quiet"] for row in rows] == ["3 of 4", "1 of 1", "1 of 1", "1 of 1", "2 of 2"]
    assert [row["threads"] for row in rows] == ["2", "", "", "", ""]


def test_the_report_has_a_table_of_times_only_for_systems_that_tell_theirs() -> None:
    assert "prompts.jsonl" in bench_report(result())
    lines = round_table(summaries(result())).splitlines()
    assert len(lines) == 4
    assert "25.0%" in lines[2]
    assert "50.0%" in lines[2]
    peers_only = replace(result(), systems=result().systems[:2])
    assert "Where a round's time goes" not in bench_report(peers_only)


@given(st.lists(st.lists(st.text("abc", max_size=9), min_size=3, max_size=3), max_size=5))
def test_the_lines_of_a_table_are_equally_long(rows: list[list[str]]) -> None:
    lines = markdown_table(["", "x", "long header"], rows).splitlines()
    assert len(lines) == len(rows) + 2
    assert len({len(line) for line in lines}) == 1
    assert all(set(cell) <= set("-: ") and "--" in cell for cell in lines[1].strip("|").split("|"))


def test_plots_are_written(tmp_path: Path) -> None:
    plot_throughput(result(), tmp_path / "throughput.png")
    plot_rounds(result(), tmp_path / "round.png")
    plot_rounds(replace(result(), systems=result().systems[:2]), tmp_path / "none.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round.png", "throughput.png"]
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
