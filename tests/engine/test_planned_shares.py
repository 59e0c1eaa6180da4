"""Models that our decoder does not know, over ranks that divide them as transformers' plan says."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.engine.loading import load_model
from paceline.engine.model.planned_shares import check_plan
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.errors import ModelNotUsable, StartupError
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.types import RankGrid
from tests.checkpoints import EXPERTS, MAX_LENGTH, VOCABULARY_SIZE, write_model
from tests.engine.test_families import FULL, write_twin_experts
from tests.engine.test_ranks import LIMIT, OPTIONS, PROMPTS, SHARES, spoken
from tests.fakes.threaded_ranks import loaded_on_ranks

THREE = RankGrid(3, 1)
"""So many that the order of a sum counts. They do not divide the vocabulary."""
OF_THREE = {"num_attention_heads": 6, "num_key_value_heads": 3}
STRICT = EngineOptions(kv_memory="1MiB", numerics="strict")
UNSEEN_WINDOW = {"sliding_window": MAX_LENGTH}


def write_with_biases(folder: Path, family: str, **changes: Any) -> Path:
    """Write a random model whose biases are random too: transformers begins with zeros."""
    write_model(folder, family, **changes)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(6)
    drawn = {name: torch.randn_like(one) for name, one in tensors.items() if name.endswith("bias")}
    save_file(tensors | drawn, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "grid", "heads"),
    [
        ("Starcoder2", {**UNSEEN_WINDOW, **OF_THREE}, THREE, (2, 1)),
        ("Qwen3Moe", EXPERTS, SHARES, (2, 1)),
        # Its norms go over all heads, so its plan gathers queries and keys, and each rank has all heads.
        ("Olmoe", EXPERTS, SHARES, (4, 2)),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ("Phi", {}, SHARES, (2, 1)),
                ("Cohere2", {**UNSEEN_WINDOW, "layer_types": FULL}, SHARES, (2, 1)),
                ("Exaone4", {**UNSEEN_WINDOW, "sliding_window_pattern": 1}, SHARES, (2, 1)),
                ("ExaoneMoe", {**EXPERTS, **UNSEEN_WINDOW, "layer_types": FULL}, SHARES, (2, 1)),
                ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}, SHARES, (2, 1)),
                ("Mixtral", {"num_local_experts": 4}, SHARES, (2, 1)),
            )
        ),
    ],
)
def test_outputs_of_what_is_no_plain_decoder_equal_hugging_face(
    family: str, changes: dict[str, Any], grid: RankGrid, heads: tuple[int, int], tmp_path: Path
) -> None:
    target = write_with_biases(tmp_path, family, **changes)
    reference = HuggingFaceReference(str(target), "float32")
    expected = [reference.generate(prompt, LIMIT) for prompt in PROMPTS]
    with loaded_on_ranks(target, grid, OPTIONS) as model:
        runner = Runner(model, OPTIONS)
        assert spoken(runner, PROMPTS, expected) == expected
        assert (model.kv_shape.head_count, model.kv_shape.kv_head_count) == heads
        assert f"ModuleDecoder, {grid.share_count} shares" in runner.describe().kernels


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_strict_rows_over_shares_depend_neither_on_the_others_nor_on_drafts(dtype: Any, tmp_path: Path) -> None:
    target = write_with_biases(tmp_path, "Starcoder2", **UNSEEN_WINDOW, **OF_THREE)
    rows = [PackedRow(str(n), 0, tuple(range(9 + n, 40 + 7 * n)), draft_count=n) for n in range(3)]
    with loaded_on_ranks(target, THREE, STRICT, dtype) as model:
        runner = Runner(model, STRICT)
        together = runner.forward(rows)
        runner.release([row.sequence_id for row in rows])
        for row, logits in zip(rows, together, strict=True):
            plain = []
            for count in range(row.draft_count, -1, -1):
                stop = len(row.token_ids) - count
                base = runner.cache.length(row.sequence_id)
                plain += runner.forward([PackedRow(row.sequence_id, base, row.token_ids[base:stop])])
            assert torch.equal(logits, torch.cat(plain))  # type: ignore[arg-type]


def test_half_precision_of_experts_is_refused_over_shares_as_in_one_process(tmp_path: Path) -> None:
    target = write_model(tmp_path, "Qwen3Moe", **EXPERTS)
    with pytest.raises(StartupError) as alone:
        Runner(load_model(str(target), "bfloat16", "cpu"), OPTIONS)
    with pytest.raises(StartupError) as divided, loaded_on_ranks(target, SHARES, OPTIONS, "bfloat16"):
        pass
    assert divided.value.message == alone.value.message


def test_near_ties_of_routers_are_no_reason_to_refuse_a_mixture_over_shares(tmp_path: Path) -> None:
    target, options = write_twin_experts(tmp_path), replace(OPTIONS, numerics="fast")
    with loaded_on_ranks(target, SHARES, options, "bfloat16") as model:
        assert model.mixes_experts


def test_a_plan_that_asks_for_another_kind_of_division_is_refused_by_its_name() -> None:
    config = SimpleNamespace(base_model_tp_plan={"layers.*.o_proj": "rowwise", "layers.*.self_attn": "local_params"})
    with pytest.raises(StartupError, match=r"of Any: .* plan divides layers.\*.self_attn by 'local_params'"):
        check_plan("Any", config, SHARES)


def test_a_module_that_does_not_run_with_the_heads_of_a_share_is_refused_at_load(tmp_path: Path) -> None:
    """Its norms have a weight for each head, and the plan of its architecture says nothing of them."""
    target = write_model(tmp_path, "Cohere", use_qk_norm=True)
    assert load_model(str(target), "float32", "cpu")
    words = "divided as transformers' plan says, CohereForCausalLM cannot run .*; start with --tensor-parallel 1"
    with pytest.raises(ModelNotUsable, match=words), loaded_on_ranks(target, SHARES, OPTIONS):
        pass


def test_the_first_rank_gets_logits_of_the_whole_vocabulary(tmp_path: Path) -> None:
    target = write_with_biases(tmp_path, "Phi", num_attention_heads=6, num_key_value_heads=3)
    row = PackedRow("a", 0, tuple(range(20, 60)), draft_count=2)
    (alone,) = Runner(load_model(str(target), "float32", "cpu"), OPTIONS).forward([row])
    with loaded_on_ranks(target, THREE, OPTIONS) as model:
        (divided,) = Runner(model, OPTIONS).forward([row])
    assert isinstance(alone, torch.Tensor) and isinstance(divided, torch.Tensor)
    assert divided.shape == (3, VOCABULARY_SIZE)
    torch.testing.assert_close(divided, alone, rtol=1e-4, atol=1e-4)
