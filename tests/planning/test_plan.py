"""Plans: what is chosen fits, loses least speed, and is what services that are started so have."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from paceline.engine.memory import shares_of
from paceline.errors import InvalidRequest, ModelNotUsable
from paceline.planning.dimensions import VALUE_BYTES, dimensions_of, read_dimensions
from paceline.planning.flags import variables, write_variables
from paceline.planning.heads import read_heads_size
from paceline.planning.memory import (
    LEAST_LOGITS,
    MIB,
    CallSize,
    WeightForm,
    held_logit_count,
    kv_bytes,
    rotation_bytes,
    serving_work_bytes,
    token_bytes,
    weight_bytes,
)
from paceline.planning.search import (
    INT8_STEPS,
    Pair,
    Plan,
    Setting,
    Workload,
    floor_costs,
    plan,
    row_counts,
    weighed,
)
from paceline.planning.speed import MACHINES, expected_tokens
from paceline.process.cluster_plan import settings_here
from tests.checkpoints import write_model
from tests.planning.pairs import BUILTIN, LARGE, LARGE_ON_CUDA, QWEN3_8B, QWEN3_600M

CHATS = Workload(20, 512, 256, 0.7)
PAIRS = st.sampled_from([BUILTIN, LARGE, LARGE_ON_CUDA, replace(BUILTIN, draft=None)])
SETTINGS = st.builds(
    Setting,
    st.integers(0, 8),
    st.integers(1, 64),
    st.sampled_from([16, 64, 256, 512]),
    st.sampled_from(["none", "draft", "both"]),
)


@cache
def weighed_settings(pair: Pair) -> Plan:
    return plan(pair, CHATS, floor_costs(pair, MACHINES[pair.device]), 0)


def planned(pair: Pair, budget_bytes: int) -> Plan:
    return replace(weighed_settings(pair), budget_bytes=budget_bytes)


@given(PAIRS, SETTINGS, st.integers(1, 40), st.integers(2, 2000))
def test_a_service_that_is_started_with_the_planned_memory_has_the_planned_cache(
    pair: Pair, setting: Setting, conversation_count: int, token_count: int
) -> None:
    workload = Workload(conversation_count, token_count, token_count // 2, 0.7)
    need = weighed(pair, workload, floor_costs(pair, MACHINES[pair.device])[0], setting).target
    call, form = CallSize.of_rows(setting.row_count, setting.chunk_tokens), pair.target_form(setting.int8)
    shares = shares_of(str(need.total), need.process + need.weights, pair.target, form, call)
    assert (shares.kv_bytes, shares.work_bytes, shares.logit_count) == (need.kv, need.work, need.logit_count)


@given(PAIRS, st.integers(0, 120_000))
def test_what_is_chosen_fits_and_nothing_that_fits_is_faster_with_the_same_weights(pair: Pair, budget_mib: int) -> None:
    made = planned(pair, budget_mib * MIB)
    chosen = made.chosen
    fitting = [one for one in made.candidates if one.total_bytes <= budget_mib * MIB]
    assert (chosen is None) is (not fitting) is (made.bound.total_bytes > budget_mib * MIB)
    if chosen:
        alike = [one for one in fitting if one.setting.int8 == chosen.setting.int8]
        assert chosen in fitting and chosen.tokens_per_s == max(one.tokens_per_s for one in alike)


def test_weights_of_int8_are_the_last_step() -> None:
    made = planned(LARGE, 0)
    plain = [one.total_bytes for one in made.candidates if one.setting.int8 == "none"]
    enough, too_little = planned(LARGE, min(plain)).chosen, planned(LARGE, min(plain) - 1).chosen
    assert enough and enough.setting.int8 == "none"
    assert too_little and too_little.setting.int8 != "none"


def test_the_frontier_rises_with_memory_and_ends_with_the_fastest() -> None:
    found = planned(LARGE, 0).frontier
    assert all(one.total_bytes < other.total_bytes for one, other in zip(found, found[1:], strict=False))
    assert all(one.tokens_per_s < other.tokens_per_s for one, other in zip(found, found[1:], strict=False))


def test_rows_are_planned_up_to_all_conversations() -> None:
    assert row_counts(1) == [1]
    assert row_counts(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert row_counts(32) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def test_a_plans_variables_are_settings_of_the_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = planned(BUILTIN, 4 << 30).chosen
    assert chosen and chosen.draft
    write_variables(tmp_path / "plan.env", variables(chosen, "builtin:target", "builtin:draft", "none"), "a plan")
    lines = (tmp_path / "plan.env").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# a plan"
    for line in lines[1:]:
        monkeypatch.setenv(*line.split("=", 1))
    coordinator, target, draft = (settings_here(role) for role in ("coordinator", "target", "draft"))
    assert (coordinator.batch_size, coordinator.draft_count) == (target.max_rows, chosen.setting.draft_count)
    assert target.memory == f"{math.ceil(chosen.target.total / MIB)}MiB"
    assert (draft.max_rows, draft.prefill_chunk_tokens) == (target.max_rows, chosen.setting.chunk_tokens)


@pytest.mark.parametrize("name", ["my models/target", "target;date", "$HOME", "it's"])
def test_what_a_shell_and_docker_read_in_two_ways_is_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="without spaces and signs of the shell's"):
        write_variables(tmp_path / "plan.env", {"PACELINE_TARGET_MODEL": name}, "a plan")
    assert not (tmp_path / "plan.env").exists()


def test_the_sizes_of_a_configuration_give_the_numbers_of_its_weight_files() -> None:
    for model in (BUILTIN.target, BUILTIN.draft):
        assert model and model.stored_parameter_count == replace(model, stored_parameter_count=None).parameter_count
    assert QWEN3_8B.parameter_count == pytest.approx(8.19e9, rel=0.005)


def test_a_config_alone_is_enough_and_what_is_no_model_is_refused(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config |= {"vocab_size": 100, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_dimensions(str(tmp_path / "config.json"))
    assert found == dimensions_of(config) and (found.kv_head_count, found.head_size, found.dtype) == (4, 16, "float32")
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": 8}))
    with pytest.raises(ModelNotUsable, match="experts"):
        read_dimensions(str(tmp_path / "config.json"))
    for text in ("{}", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelNotUsable, match="sizes of a decoder"):
            read_dimensions(str(tmp_path / "config.json"))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotUsable, match="half written"):
        read_dimensions(str(tmp_path))
    with pytest.raises(ModelNotUsable, match="nowhere"):
        read_dimensions("nowhere")


@pytest.mark.parametrize(
    "positions",
    [
        # Phi-3's files of 2024, then Phi-4-mini's, then what transformers 5 writes.
        {"rope_scaling": {"type": "su", "short_factor": [1.0]}, "original_max_position_embeddings": 4096},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}, "original_max_position_embeddings": 4096},
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}},
    ],
)
def test_a_model_of_longrope_is_planned_as_long_as_it_is_served(positions: dict[str, object]) -> None:
    """Conversations of 100,000 tokens were planned, which the service refuses, with rotations for as many."""
    config = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config |= {"vocab_size": 100, "max_position_embeddings": 131_072}
    assert dimensions_of(config | positions).max_length == 4096
    assert dimensions_of(config | {"rope_scaling": {"type": "yarn", "factor": 4.0}}).max_length == 131_072


@pytest.mark.parametrize("names", [("model",), ("model-00001-of-00002", "model-00002-of-00002")])
def test_weights_that_a_folder_has_twice_are_counted_once(tmp_path: Path, names: tuple[str, ...]) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config |= {"vocab_size": 100, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in names:
        save_file({f"{name}.weight": torch.ones(5, 4)}, tmp_path / f"{name}.safetensors")
    save_file({"norm.weight": torch.ones(7)}, tmp_path / "consolidated.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    if len(names) > 1:
        index.write_text(json.dumps({"weight_map": {f"{name}.weight": f"{name}.safetensors" for name in names}}))
    assert read_dimensions(str(tmp_path)).stored_parameter_count == 20 * len(names)
    if len(names) > 1:
        (tmp_path / f"{names[1]}.safetensors").unlink()
        with pytest.raises(ModelNotUsable, match=names[1]):
            read_dimensions(str(tmp_path))
        index.write_text("{")
        with pytest.raises(ModelNotUsable, match="does not name the files of the weights"):
            read_dimensions(str(tmp_path))


def test_heads_are_read_from_their_files() -> None:
    found = read_heads_size("builtin:clover")
    assert found.parameter_count > 0 and found.layer_count == 1


def test_heads_beside_weights_of_int8_have_a_byte_a_number() -> None:
    """Steps of them were planned to read numbers of the target's dtype, and their weights to hold such."""
    pair = replace(BUILTIN, draft=None, heads=read_heads_size("builtin:eagle"))
    assert pair.heads
    costs, setting = floor_costs(pair, MACHINES["cpu"])[INT8_STEPS.index("both")], Setting(3, 8, 256, "both")
    assert costs.heads and costs.heads.weights_bytes == pair.heads.parameter_count + pair.target.embedding_count
    beside, alone = (weighed(one, CHATS, costs, setting).target for one in (pair, replace(pair, heads=None)))
    assert beside.weights - alone.weights == pair.heads.parameter_count


def test_bytes_of_a_cache_are_those_of_whole_pages() -> None:
    form = WeightForm("bfloat16")
    assert token_bytes(QWEN3_8B, form) == 144 * 1024
    assert kv_bytes(10, 3, 17, 16) == 3 * 32 * 10


def test_weights_on_a_cpu_hold_a_tied_head_twice_and_int8_takes_a_byte_a_number() -> None:
    on_cpu, on_gpu = (weight_bytes(QWEN3_600M, WeightForm("bfloat16", device=device)) for device in ("cpu", "cuda"))
    assert on_cpu - on_gpu == 2 * QWEN3_600M.embedding_count
    quantized = weight_bytes(QWEN3_8B, WeightForm("bfloat16", is_int8=True))
    assert 0.5 < quantized / weight_bytes(QWEN3_8B, WeightForm("bfloat16")) < 0.6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_take_the_bytes_of_their_dtype(dtype: str, tmp_path: Path) -> None:
    """In half precision each of their numbers was counted as float32: the plan said twice what they take."""
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    write_model(tmp_path, "Qwen3Moe", dtype=getattr(torch, dtype), **experts)
    found = read_dimensions(str(tmp_path))
    weights = weight_bytes(found, WeightForm(dtype, device="cuda")) - rotation_bytes(found)
    assert found.stored_parameter_count
    assert weights == pytest.approx(found.stored_parameter_count * VALUE_BYTES[dtype], rel=0.01)


def test_no_plan_has_int8_weights_of_experts() -> None:
    experts = replace(BUILTIN, target=replace(BUILTIN.target, mixes_experts=True))
    made = plan(experts, CHATS, floor_costs(experts, MACHINES["cpu"]), 1 << 40)
    assert {one.setting.int8 for one in made.candidates} == {"none", "draft"}


@given(PAIRS, st.integers(1, 256), st.integers(0, 1 << 36))
def test_a_call_holds_logits_within_its_share_or_of_one_row_alone(pair: Pair, row_count: int, left: int) -> None:
    form, call = pair.target_form("none"), CallSize.of_rows(row_count, 256)
    count = held_logit_count(pair.target, form, call, left_bytes=left)
    work = serving_work_bytes(pair.target, form, replace(call, logit_count=count))
    assert count == LEAST_LOGITS or (count > LEAST_LOGITS and 8 * work <= left)


def test_expected_tokens_are_those_of_a_chain_of_drafts() -> None:
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(0.9, 0) == 1
