"""Benches without models: the order of the runs, the kept results, and their evaluation."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.builtin import resolve_model
from paceline.client import Client, describe_draft, describe_target
from paceline.errors import IncompatiblePair, InvalidRequest, ModelNotUsable, StartupError, TokenizerNotFound
from paceline.measure.bench import grid
from paceline.measure.bench.grid import BenchPlan, SystemSpec
from paceline.measure.bench.plots import plot_rounds, plot_throughput
from paceline.measure.bench.report import bench_report, category_table, round_table, source_table, throughput_table
from paceline.measure.bench.result import BenchResult, Floor, PromptPass, Run, SystemResult, bench_result_from_json
from paceline.measure.bench.summary import category_summaries, compared_kinds, summaries, to_json
from paceline.measure.cluster import ClusterSystem
from paceline.measure.contention import Contention
from paceline.measure.equivalence.agreement import Mismatch
from paceline.measure.equivalence.equivalence import HUGGING_FACE, PLAIN, must_equal
from paceline.measure.equivalence.precision import Precision
from paceline.measure.files import prepare_folder
from paceline.measure.peers.llama_cpp import check_llama_cpp
from paceline.measure.prompts import read_text_codec, select_lines, thin_out
from paceline.measure.rounds import Counters, RoundUse, RowUse, rounds_between
from paceline.measure.source_sets import ALL_SOURCES, name_of, read_source_set
from paceline.measure.tables import markdown_table
from paceline.measure.traffic import pass_traffic
from paceline.process.cluster_plan import ClusterOptions, plan_cluster
from paceline.prompt_file import InputLine
from paceline.types import (
    PAPER_POLICIES,
    ClusterStatistics,
    DraftSource,
    HopTime,
    PassTraffic,
    PolicyName,
    SourceUsage,
    TokenIds,
    Usage,
)
from tests.clusters import cluster_here
from tests.conftest import PairOfCheckpoints
from tests.fakes.model_services import describe

AUTO = Precision("auto")
PLAN = BenchPlan(ClusterOptions(), grid.KINDS, (8, 1), ("continuous", "eqspec"), ("5", "auto"), (AUTO,), 16, 3)
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


def test_peers_that_decode_one_at_a_time_are_measured_once_and_ours_in_all_variants() -> None:
    small, large = grid.groups(PLAN)
    assert [spec.batch_size for spec in small] == [1] * len(small)
    assert {spec.kind for spec in small} == set(grid.KINDS)
    assert {spec.kind for spec in large} == {grid.HUGGING_FACE, *grid.OURS}
    variants = [(spec.policy, spec.draft_count) for spec in large if spec.kind == grid.SPECULATIVE]
    assert variants == [("continuous", "5"), ("continuous", "auto"), ("eqspec", "5"), ("eqspec", "auto")]
    assert len({spec.label for spec in small}) == len(small)


@pytest.mark.review  # B13
def test_in_half_precision_peers_run_once_and_the_papers_policies_are_fast_by_name() -> None:
    precisions = tuple(map(Precision.parse, ("bfloat16", "bfloat16-fast")))
    group = grid.groups(replace(PLAN, precisions=precisions, draft_counts=("5",)))[0]
    assert [spec.kind for spec in group].count(grid.HUGGING_FACE) == 1
    served = {spec.label: grid.cluster_options(spec, PLAN.pair) for spec in group if spec.is_ours}
    assert {label: (one.numerics, one.layout) for label, one in served.items()} == {
        "Paceline, plain, bfloat16": ("auto", "paged"),
        "Paceline, plain, bfloat16-fast": ("fast", "paged"),
        "Paceline, 5 drafts, bfloat16": ("auto", "paged"),
        "Paceline, 5 drafts, bfloat16-fast": ("fast", "paged"),
        "Paceline, eqspec, 5 drafts, bfloat16-fast": ("fast", "dense"),
    }


@pytest.mark.review  # B13
@pytest.mark.parametrize(
    ("word", "policy", "equal_to_plain", "equal_to_hugging_face"),
    [
        ("float32", "continuous", True, True),
        ("float32", "eqspec", True, True),
        ("bfloat16", "continuous", True, False),
        ("bfloat16", "eqspec", False, False),
        ("float16-strict", "exspec", True, False),
        ("float16-fast", "continuous", False, False),
    ],
)
def test_outputs_must_equal_what_their_precision_promises(
    word: str, policy: str, equal_to_plain: bool, equal_to_hugging_face: bool
) -> None:
    precision = Precision.parse(word).under(policy)
    found = [must_equal(reference, precision) for reference in (PLAIN, HUGGING_FACE)]
    assert found == [equal_to_plain, equal_to_hugging_face]


def test_one_sequence_at_a_time_and_plain_decoding_have_one_lane() -> None:
    options = {spec: grid.cluster_options(spec, PLAN.pair) for group in grid.groups(PLAN) for spec in group}
    lanes = {(spec.kind, spec.batch_size, spec.policy): one.lanes for spec, one in options.items() if spec.is_ours}
    assert lanes[grid.SPECULATIVE, 1, "continuous"] == 1
    assert lanes[grid.SPECULATIVE, 8, "continuous"] is None
    assert lanes[grid.PLAIN, 8, ""] == 1
    layouts = {spec.policy: one.layout for spec, one in options.items() if spec.kind == grid.SPECULATIVE}
    assert layouts == {"continuous": "paged", "eqspec": "dense"}
    assert {one.draft_count for spec, one in options.items() if spec.kind == grid.PLAIN} == {"0"}


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_the_papers_policies_alone_have_one_lane_and_are_measured_dense(policy: str) -> None:
    is_the_papers = policy in PAPER_POLICIES
    served = plan_cluster(ClusterOptions(policy=policy)).coordinator.settings
    assert served.lane_count == (1 if is_the_papers else 2)
    benched = grid.cluster_options(SystemSpec(grid.SPECULATIVE, 8, AUTO, policy, "5"), ClusterOptions())
    assert (benched.lanes, benched.layout) == ((1, "dense") if is_the_papers else (None, "paged"))


async def test_no_pass_finds_its_prompts_cached_by_the_one_before(pairs: dict[str, PairOfCheckpoints]) -> None:
    pair = ClusterOptions(target_model=str(pairs["Llama"].target), draft_model=str(pairs["Llama"].draft))
    options = grid.cluster_options(SystemSpec(grid.SPECULATIVE, 2, AUTO, "continuous", "3"), pair)
    async with cluster_here(options) as addresses, Client(addresses.coordinator) as client:
        assert addresses.draft
        system = ClusterSystem(client, addresses, 4)
        first, again = [await system.run([tuple(range(10, 74))]) for _ in range(2)]
        assert first.outputs == again.outputs
        for model in (await describe_target(addresses.target), await describe_draft(addresses.draft)):
            assert model.cache.shared_token_count == 0


async def test_requests_are_drafted_for_by_the_asked_sources_and_the_rounds_tell_them(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    pair = ClusterOptions(target_model=str(pairs["Llama"].target), draft_model=str(pairs["Llama"].draft))
    options = grid.cluster_options(SystemSpec(grid.SPECULATIVE, 2, AUTO, "continuous", "3"), pair)
    prompt = tuple(range(10, 20))
    async with cluster_here(options) as addresses, Client(addresses.coordinator) as client:
        found = [await ClusterSystem(client, addresses, 8, 0).run([prompt])]
        predictions = {prompt: TokenIds(tuple(found[0].outputs[0]))}
        for source in (DraftSource.DRAFT, DraftSource.PREDICTION):
            found.append(await ClusterSystem(client, addresses, 8, None, (source,), predictions).run([prompt]))
        short = await ClusterSystem(client, addresses, 8).with_limit(1).run([prompt])
    assert len({str(one.outputs) for one in found}) == 1
    assert short.outputs == [found[0].outputs[0][:1]]
    drafted = [{used.source for used in one.rounds.sources} for one in found if one.rounds]
    assert drafted == [set(), {DraftSource.DRAFT}, {DraftSource.PREDICTION}]
    assert [one.usages[0].sources for one in found] == [one.rounds.sources for one in found if one.rounds]


def test_rounds_are_the_difference_of_two_moments() -> None:
    old = ClusterStatistics(
        round_count=3,
        round_counts_by_group_size=((4, 3),),
        round_s=10.0,
        propose=HopTime(1.0, 1.0, 1.0),
        verify=HopTime(1.0, 1.0, 1.0),
    )
    new = ClusterStatistics(
        round_count=5,
        round_counts_by_group_size=((2, 1), (4, 4)),
        round_s=20.0,
        propose=HopTime(1.5, 1.25, 3.0),
        verify=HopTime(1.5, 1.25, 5.0),
    )
    usages = [Usage(10, 8, 12, 6, 2), Usage(20, 5, 4, 1, 4)]
    found = rounds_between(Counters(old, 0.0, 1.0), Counters(new, 0.5, 2.0), usages, 4)
    assert (found.round_count, found.slot_count, found.filled_slot_count) == (2, 8, 6)
    assert (found.committed_count, found.verified_row_count, found.drafted_count, found.accepted_count) == (
        13,
        6,
        16,
        7,
    )
    assert found.context_token_count == 2 * 14 + 4 * 22
    assert found.seconds == {
        "draft": 1.5,
        "verify": 3.0,
        "realignment": 1.5,
        "wire": 1.0,
        "queue": 0.5,
        "coordinator": 2.5,
    }
    assert sum(found.seconds.values()) == new.round_s - old.round_s


def test_rounds_that_did_nothing_have_no_rates() -> None:
    empty = RoundUse()
    assert (empty.acceptance, empty.tokens_per_row, empty.occupancy) == (None, 0.0, 0.0)
    assert set(empty.time_shares.values()) == {0.0}


def test_the_floor_is_weights_once_a_round_drafts_once_a_draft_and_the_cached_tokens() -> None:
    floor = Floor("auto", 1000.0, PassTraffic(100, 2), PassTraffic(10, 1))
    drafts_a_row = 200 / 50  # tokens that the suffix index drafted read no weights
    assert floor.seconds(ROUNDS) == ((10 * 100 + 5000 * 2) + drafts_a_row * (10 * 10 + 5000 * 1)) / 1000


def test_pass_traffic_counts_the_head_and_not_an_embedding_of_its_own(pairs: dict[str, PairOfCheckpoints]) -> None:
    model, served = str(pairs["Llama"].target), describe("target")
    traffic = pass_traffic(model, replace(served, dtype="float32"))
    vocabulary, hidden, kv_size, inner, layers = 320, 64, 32, 96, 2
    layer = 2 * hidden * hidden + 2 * hidden * kv_size + 3 * hidden * inner + 2 * hidden
    assert traffic.weight_bytes == 4 * (layers * layer + hidden + vocabulary * hidden)
    assert traffic.token_bytes == 4 * layers * 2 * kv_size
    half = pass_traffic(model, replace(served, dtype="bfloat16"))
    assert (2 * half.weight_bytes, 2 * half.token_bytes) == (traffic.weight_bytes, traffic.token_bytes)
    quantized = pass_traffic(
        model, replace(served, dtype="float32", quantization="int8", kernels="cpu, CompiledDecoder int8, 8 lanes")
    )
    assert (4 * quantized.weight_bytes, quantized.token_bytes) == (traffic.weight_bytes, traffic.token_bytes)
    assert pass_traffic(model, replace(served, dtype="float32", quantization="int8")) == traffic  # dequantised at load


def spec(kind: str, batch_size: int, draft_count: str = "") -> SystemSpec:
    return SystemSpec(kind, batch_size, AUTO, "continuous" if kind == grid.SPECULATIVE else "", draft_count)


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


def test_each_set_of_sources_is_a_system_and_one_without_a_draft_model_has_no_draft_service() -> None:
    sets = tuple(map(read_source_set, ("all", "draft", "suffix", "draft+suffix")))
    plan = replace(PLAN, kinds=(grid.SPECULATIVE,), batch_sizes=(8,), draft_counts=("auto",), source_sets=sets)
    (group,) = grid.groups(plan)
    drafts = {one.label: grid.cluster_options(one, plan.pair).draft_model for one in group}
    assert drafts == {
        "Paceline, auto drafts": "builtin:draft",
        "Paceline, auto drafts from draft": "builtin:draft",
        "Paceline, auto drafts from suffix": "none",
        "Paceline, auto drafts from draft+suffix": "builtin:draft",
        # Under the paper's policies a draft service alone drafts.
        "Paceline, eqspec, auto drafts": "builtin:draft",
        "Paceline, eqspec, auto drafts from draft": "builtin:draft",
        "Paceline, eqspec, auto drafts from draft+suffix": "builtin:draft",
    }
    assert [name_of(one) for one in sets] == ["all", "draft", "suffix", "draft+suffix"]


def test_heads_are_measured_without_a_draft_service_and_other_systems_have_them_where_they_may_draft() -> None:
    pair = ClusterOptions(heads="builtin:clover")
    sets = (ALL_SOURCES, (DraftSource.DRAFT,))
    plan = replace(
        PLAN, pair=pair, kinds=(grid.PLAIN, grid.SPECULATIVE, grid.HEADS), batch_sizes=(8,), source_sets=sets
    )
    (group,) = grid.groups(replace(plan, draft_counts=("5",)))
    options = {one.label: grid.cluster_options(one, pair) for one in group}
    assert {label: (one.draft_model, one.heads) for label, one in options.items()} == {
        "Paceline, plain": ("builtin:draft", "none"),
        "Paceline, 5 drafts": ("builtin:draft", "builtin:clover"),
        "Paceline, 5 drafts from draft": ("builtin:draft", "none"),
        "Paceline, eqspec, 5 drafts": ("builtin:draft", "none"),
        "Paceline, eqspec, 5 drafts from draft": ("builtin:draft", "none"),
        "Paceline, 5 drafts from heads": ("none", "builtin:clover"),
    }


def test_a_word_that_is_no_set_of_sources_is_refused_with_those_there_are() -> None:
    for word in ("luck", "draft+luck", "draft+all", ""):
        with pytest.raises(InvalidRequest, match="give all, or any of draft, suffix, prediction"):
            read_source_set(word)


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


def test_categories_are_chosen_by_name_and_unknown_ones_answered_with_the_known(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"prompt": "a", "category": "qa"}\n{"prompt": "b", "category": "math"}\n{"prompt": "c", "category": "qa"}\n'
    )
    assert [line.prompt for line in select_lines(path, ["qa"])] == ["a", "c"]
    assert [line.prompt for line in select_lines(path)] == ["a", "b", "c"]
    with pytest.raises(InvalidRequest, match="'art' is not in .*, which has math, qa"):
        select_lines(path, ["qa", "art"])


def test_a_wrong_line_stops_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{half\n')
    with pytest.raises(InvalidRequest, match="line 2 is not JSON.*1 of 2 lines are wrong"):
        select_lines(tmp_path / "in.jsonl")


@given(st.integers(1, 40), st.integers(1, 50))
def test_thinning_out_keeps_order_and_reaches_all_parts(line_count: int, count: int) -> None:
    lines = [InputLine(number, "x") for number in range(line_count)]
    kept = thin_out(lines, count)
    numbers = [line.id for line in kept]
    assert len(kept) == min(count, line_count)
    assert numbers == sorted(set(numbers))
    gaps = [after - before for before, after in zip(numbers, numbers[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert thin_out(lines, None) == lines


def test_pairs_that_lack_a_tokenizer_or_a_model_are_refused(pairs: dict[str, PairOfCheckpoints]) -> None:
    with pytest.raises(TokenizerNotFound, match="has no tokenizer, and prompts are text"):
        read_text_codec("builtin:target", str(pairs["Llama"].draft))
    with pytest.raises(ModelNotUsable, match="is not a directory"):
        read_text_codec("builtin:target", "/nowhere")


def test_pairs_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    draft = shutil.copytree(resolve_model("builtin:draft"), tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(IncompatiblePair, match="different tokenizers"):
        read_text_codec("builtin:target", str(draft))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match=r"--output .*file.* cannot be written"):
        prepare_folder(tmp_path / "file")


def test_a_precision_is_one_word() -> None:
    words = ("auto", "bfloat16-strict", "float16-fast")
    assert [str(Precision.parse(word)) for word in words] == list(words)
    assert Precision.parse("bfloat16-strict") == Precision("bfloat16", "strict")
    for word in ("int8", "float32-", "float32-auto"):
        with pytest.raises(InvalidRequest, match=f"'{word}'"):
            Precision.parse(word)


def test_llama_cpp_without_its_library_or_file_names_the_remedy() -> None:
    with pytest.raises((InvalidRequest, StartupError), match=r"paceline\[llama-cpp\]|--gguf FILE"):
        check_llama_cpp(None)


def test_a_pair_without_a_draft_model_is_measured_without_peers_that_need_one() -> None:
    plan = replace(PLAN, pair=ClusterOptions(draft_model="none"))
    kinds = {spec.kind for group in grid.groups(plan) for spec in group}
    assert kinds == set(grid.KINDS) - {"hf-assisted", "hf-assisted-fixed"}
    assert read_text_codec("builtin:target", "none").has_chat_template
