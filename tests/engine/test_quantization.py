"""Weights of int8, and rows: what they become, and that a model of them runs as Hugging Face's with the same."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paceline.engine import backend
from paceline.engine.loading import load_model
from paceline.engine.model.checkpoint import find_checkpoint
from paceline.engine.model.compiled_decoder import CompiledDecoder
from paceline.engine.model.loader import read_module
from paceline.engine.model.plain_decoder import PlainDecoder
from paceline.engine.model.quantized_layers import QuantizedLinear, quantize_layers
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.quantization import LARGEST, QuantizedWeight
from paceline.engine.runner import Runner
from paceline.engine.self_check import TOLERANCES, own_logits
from paceline.errors import ModelNotUsable, StartupError
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.types import Dtype, Quantization
from tests.checkpoints import FAMILIES, write_model
from tests.cluster.test_exactness import generate, requests
from tests.clusters import cluster
from tests.conftest import PairOfCheckpoints
from tests.tools import NEEDS_ROUNDED_ROWS, built_kernels


@given(column_count=st.integers(1, 20), size=st.integers(1, 40), exponent=st.integers(-20, 20), seed=st.integers(0, 99))
def test_a_number_is_the_nearest_of_255_that_reach_to_its_columns_largest(
    column_count: int, size: int, exponent: int, seed: int
) -> None:
    weight = torch.randn((column_count, size), generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    quantized = QuantizedWeight.of(weight)
    assert (quantized.numbers.abs().amax(dim=1) == LARGEST).all()
    off = (quantized.dequantized() - weight).abs()
    assert (off <= 0.501 * quantized.scales[:, None]).all()


def test_a_column_of_zeros_stays_one() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    assert torch.equal(QuantizedWeight.of(weight).dequantized()[0], torch.zeros(2))


def test_columns_are_quantised_each_by_itself_so_that_joined_weights_are_the_same() -> None:
    weight = torch.randn((10, 8), generator=torch.Generator().manual_seed(1))
    whole, order = QuantizedWeight.of(weight), torch.randperm(10, generator=torch.Generator().manual_seed(2))
    joined = QuantizedWeight.joined([QuantizedWeight.of(weight[:3]), QuantizedWeight.of(weight[3:])])
    for one, other in ((joined, whole), (QuantizedWeight.of(weight[order]), whole[order])):
        assert torch.equal(one.numbers, other.numbers)
        assert torch.equal(one.scales, other.scales)


def test_every_linear_layer_is_quantised_and_an_embedding_that_is_the_head_too_stays(tmp_path: Path) -> None:
    module, _ = read_module(
        find_checkpoint(str(write_model(tmp_path, "Llama", tie_word_embeddings=True))), "auto", "cpu"
    )
    embedding: Any = module.get_input_embeddings()
    before = embedding.weight.clone()
    quantize_layers(module, "int8")
    assert not [one for one in module.modules() if type(one) is torch.nn.Linear]
    assert len([one for one in module.modules() if isinstance(one, QuantizedLinear)]) == 2 * 7 + 1
    assert torch.equal(embedding.weight, before)


def test_the_check_at_load_knows_the_quantised_weights(pairs: dict[str, PairOfCheckpoints]) -> None:
    """Beside the checkpoint's own weights, its tolerance would refuse the model."""
    module, _ = read_module(find_checkpoint(str(pairs["Llama"].target)), "auto", "cpu")
    before = own_logits(module).chosen
    quantize_layers(module, "int8")
    off = max(
        float((a - b).abs().max() / a.abs().max()) for a, b in zip(before, own_logits(module).chosen, strict=True)
    )
    assert off > 2 * TOLERANCES[torch.float32]
    assert load_model(str(pairs["Llama"].target), quantization="int8").description.quantization == "int8"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_found_though_int8_has_none(
    number: float, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    """A column with one was rounded to zeros, by the model and by what the check compares it with."""
    folder = Path(shutil.copytree(pairs["Llama"].target, tmp_path / "broken"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][5, 3] = number
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelNotUsable):
        load_model(str(folder), quantization="int8")


TOKENS, DRAFTS = tuple(range(20, 60)), 30


def logits(model: Path, dtype: Dtype, quantization: Quantization = "int8") -> torch.Tensor:
    runner = Runner(load_model(str(model), dtype, quantization=quantization), EngineOptions("1MiB"))
    (outcome,) = runner.forward([PackedRow("a", 0, TOKENS, draft_count=DRAFTS)])
    assert isinstance(outcome, torch.Tensor)
    return outcome


@pytest.mark.parametrize("family", [*FAMILIES, "Qwen2", "Phi3", "Olmo2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_kernels_the_weights_are_dequantised_and_give_the_same_logits(
    family: str, dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_kernels()
    model = write_model(tmp_path, family)
    expected = logits(model, dtype)
    monkeypatch.setattr(backend, "find_backend", lambda device: backend.Backend())
    monkeypatch.setattr("paceline.engine.model.loader.find_backend", lambda device: backend.Backend())
    found = logits(model, dtype)
    difference = float((found - expected).abs().max() / expected.abs().max())
    assert 0 < difference < TOLERANCES[torch.float32 if dtype == "float32" else torch.bfloat16]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_passes_multiply_by_int8(dtype: Dtype, pairs: dict[str, PairOfCheckpoints]) -> None:
    built_kernels()
    decoder = load_model(str(pairs["Qwen3"].target), dtype, quantization="int8").decoder
    assert isinstance(decoder, CompiledDecoder)
    assert decoder.plain.way == "int8"


def test_float16_runs_dequantised(pairs: dict[str, PairOfCheckpoints]) -> None:
    assert isinstance(load_model(str(pairs["Llama"].target), "float16", quantization="int8").decoder, PlainDecoder)


def test_what_is_no_plain_decoder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    experts = write_model(tmp_path, "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    with pytest.raises(
        StartupError, match=r"--quantization int8 cannot be had of Qwen3MoeForCausalLM.* --quantization none"
    ):
        load_model(str(experts), quantization="int8")


async def test_quantised_output_in_float32_equals_hugging_face_with_the_same_weights(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    pair, prompts = pairs["Llama"], requests(seed=3)[:8]
    reference = HuggingFaceReference(str(pair.target), "float32", quantization="int8")
    expected = [reference.generate(prompt, limit) for prompt, limit in prompts]
    plain = HuggingFaceReference(str(pair.target), "float32")
    assert [plain.generate(prompt, limit) for prompt, limit in prompts] != expected
    async with cluster(pair.target, pair.draft, quantization="int8", dtype="float32") as running:
        found, usages = await generate(running, prompts, 5)
    assert found == expected
    assert sum(usage.accepted_count for usage in usages) > 30


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_are_rounded_by_compiled_products_or_the_start_is_refused(
    dtype: Dtype, pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantised weights would be another function than that of replicas that do round rows."""
    if dtype == "float32":  # in float16 kernels multiply nothing
        monkeypatch.setattr("paceline.engine.model.loader.find_backend", lambda device: backend.Backend())
    with pytest.raises(StartupError, match=r"--quantization w8a8 cannot be had .*AVX2.* int8 or none"):
        load_model(str(pairs["Llama"].target), dtype, quantization="w8a8")


@NEEDS_ROUNDED_ROWS
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_passes_round_rows_as_a_module_does_that_rounds_them(family: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, family)
    module: Any = read_module(find_checkpoint(str(model)), "float32", "cpu")[0]
    quantize_layers(module, "w8a8")
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = module(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, -DRAFTS - 1 :]
    rounded = float((logits(model, "float32", "w8a8") - expected).abs().max())
    whole = float((logits(model, "float32", "int8") - expected).abs().max())
    assert rounded < whole / 10
