"""Benches without models: which systems run in which order on which prompts, and how rounds and bytes are counted."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.builtin import resolve_model
from paceline.client import Client, describe_draft, describe_target
from paceline.errors import IncompatiblePair, InvalidRequest, ModelNotUsable, StartupError, TokenizerNotFound
from paceline.measure.bench import grid
from paceline.measure.bench.grid import BenchPlan, SystemSpec
from paceline.measure.cluster import ClusterSystem
from paceline.measure.equivalence.equivalence import HUGGING_FACE, PLAIN, must_equal
from paceline.measure.equivalence.precision import Precision, with_precision
from paceline.measure.files import prepare_folder
from paceline.measure.peers.llama_cpp import check_llama_cpp
from paceline.measure.prompts import read_text_codec, select_lines, thin_out
from paceline.measure.rounds import Counters, RoundUse, rounds_between
from paceline.measure.source_sets import ALL_SOURCES, name_of, read_source_set
from paceline.measure.traffic import pass_traffic
from paceline.process.cluster_plan import ClusterOptions, plan_cluster
from paceline.prompt_file import InputLine
from paceline.types import PAPER_POLICIES, ClusterStatistics, DraftSource, HopTime, PolicyName, TokenIds, Usage
from tests.clusters import cluster_here
from tests.conftest import PairOfCheckpoints
from tests.fakes.model_services import describe

AUTO = Precision("auto")
PLAN = BenchPlan(ClusterOptions(), grid.KINDS, (8, 1), ("continuous", "eqspec"), ("5", "auto"), (AUTO,), 16, 3)


def test_peers_that_decode_one_at_a_time_are_measured_once_and_ours_in_all_variants() -> None:
    small, large = grid.groups(PLAN)
    assert [spec.batch_size for spec in small] == [1] * len(small)
    assert {spec.kind for spec in small} == set(grid.KINDS)
    assert {spec.kind for spec in large} == {grid.HUGGING_FACE, *grid.OURS}
    variants = [(spec.policy, spec.draft_count) for spec in large if spec.kind == grid.SPECULATIVE]
    assert variants == [("continuous", "5"), ("continuous", "auto"), ("eqspec", "5"), ("eqspec", "auto")]
    assert len({spec.label for spec in small}) == len(small)


def test_a_batch_size_that_leaves_no_system_has_no_group() -> None:
    (only,) = grid.groups(replace(PLAN, kinds=(grid.LOOKUP, grid.ASSISTED)))
    assert [spec.batch_size for spec in only] == [1, 1]
    assert grid.groups(replace(PLAN, kinds=(grid.ASSISTED,), pair=ClusterOptions(draft_model="none"))) == []


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
    found = [must_equal(reference, precision, "none") for reference in (PLAIN, HUGGING_FACE)]
    assert found == [equal_to_plain, equal_to_hugging_face]


@pytest.mark.parametrize(
    ("word", "policy", "equal_to_plain"),
    [
        ("float32", "continuous", True),
        ("float32", "eqspec", False),
        ("float32-strict", "eqspec", True),
        ("bfloat16", "continuous", True),
        ("float32-fast", "continuous", False),
    ],
)
def test_where_rows_are_rounded_to_int8_only_plain_decoding_is_promised(
    word: str, policy: str, equal_to_plain: bool
) -> None:
    """The dense layout of the paper's policies is no part of one strict model with the paged one, so it is fast."""
    precision = Precision.parse(word).under(policy, "w8a8")
    found = [must_equal(reference, precision, "w8a8") for reference in (PLAIN, HUGGING_FACE)]
    assert found == [equal_to_plain, False]
    options = with_precision(ClusterOptions(), Precision.parse(word), policy, "w8a8")
    assert options.numerics == precision.numerics


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
