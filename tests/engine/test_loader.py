"""The loader's refusals and their words."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.musicgen.configuration_musicgen import MusicgenConfig
from transformers.models.t5.configuration_t5 import T5Config

from paceline.builtin import HEADS, resolve_heads
from paceline.engine import self_check
from paceline.engine.heads.loading import load_heads
from paceline.engine.loading import load_model
from paceline.engine.model.checkpoint import find_checkpoint, open_checkpoint, read_tokenizer
from paceline.errors import ModelNotUsable, StartupError
from tests.checkpoints import (
    END_TOKEN_ID,
    EXPERTS,
    MAX_LENGTH,
    VOCABULARY_SIZE,
    edit_config,
    edit_json,
    halve,
    write_json,
    write_model,
)
from tests.conftest import PairOfCheckpoints
from tests.fakes.tokenizers import byte_tokenizer

WEIGHTS, GENERATION = "model.safetensors", "generation_config.json"


@pytest.fixture
def checkpoint(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pairs["Qwen3"].target, tmp_path / "checkpoint"))


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def store_in_eight_bits(folder: Path) -> None:
    """Quantise a weight as some tools do, which tell it in a file of their own (hf_quant_config.json)."""
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    scale = tensors[name].abs().max() / 448
    tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "is not a directory"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{half"), "not a JSON object"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "not a JSON object"),
        (lambda folder: edit_config(folder, architectures=["T5ForConditionalGeneration"]), "architecture T5For"),
        (
            lambda folder: edit_config(folder, is_encoder_decoder=True),
            "is an encoder-decoder (is_encoder_decoder is set)",
        ),
        (
            lambda folder: edit_config(folder, layer_types=["full_attention", "linear_attention"]),
            "kind linear_attention",
        ),
        (lambda folder: edit_config(folder, architectures=None), "architecture none"),
        (lambda folder: edit_config(folder, use_sliding_window=True), "sliding-window"),
        (lambda folder: edit_config(folder, quantization_config={"quant_method": "fp8"}), "is quantised"),
        (store_in_eight_bits, "is quantised: 1 weights are stored in other numbers than their own, model.layers.1."),
        (
            lambda folder: write_json(folder / "adapter_config.json", {"peft_type": "LORA"}),
            "has an adapter (adapter_config.json)",
        ),
        (lambda folder: edit_config(folder, dtype="float64"), "states dtype torch.float64"),
        (lambda folder: (folder / WEIGHTS).unlink(), "no safetensors weights"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), "`paceline convert /"),
        (lambda folder: halve(folder / WEIGHTS), "cannot be read, perhaps half written"),
        (drop_tensor, "1 tensors are missing from the weights, model.layers.1.mlp.up_proj.weight first"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "model.fp16.safetensors"), "neither model.safetensors nor"),
        (
            lambda folder: edit_config(folder, vocab_size=300),
            "have other shapes than config.json says, ('lm_head.weight",
        ),
        (lambda folder: (folder / "tokenizer.json").write_text("{half"), "the tokenizer cannot be read"),
    ],
)
def test_a_broken_checkpoint_is_refused_by_name(checkpoint: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(checkpoint)
    with pytest.raises(ModelNotUsable) as refusal:
        load_model(str(checkpoint))
    assert words in refusal.value.message
    assert str(checkpoint) in refusal.value.message


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_experts_in_one_tensor_of_eight_bits_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Their name does not end in `weight`: the numbers were read without their scales, and another model was served."""
    write_model(tmp_path, "Qwen3Moe", **EXPERTS)
    tensors = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    coded = (tensors[name] * 100).clamp(-127, 127).to(dtype)
    save_file(tensors | {name: coded}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    words = "is quantised: 1 weights are stored in other numbers than their own, model.layers.1.mlp.experts.gate_up_pro"
    with pytest.raises(ModelNotUsable, match=words):
        load_model(str(tmp_path))


def test_a_mask_of_eight_bits_is_no_weight(checkpoint: Path) -> None:
    """Older checkpoints of GPT-2 and its like hold the causal mask."""
    mask = {"model.layers.0.self_attn.bias": torch.ones((8, 8), dtype=torch.uint8).tril()}
    save_file(load_file(checkpoint / WEIGHTS) | mask, checkpoint / WEIGHTS, metadata={"format": "pt"})
    assert load_model(str(checkpoint))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]), "reads more than text (Gemma3Config has"),
        (MusicgenConfig(architectures=["MusicgenForCausalLM"]), "reads more than text (MusicgenConfig has"),
        (
            Llama4TextConfig(
                architectures=["Llama4ForCausalLM"],
                num_hidden_layers=1,
                layer_types=["full_attention"],
                attn_temperature_tuning=True,
            ),
            "attn_temperature_tuning is set",
        ),
        (
            Gemma4TextConfig(architectures=["Gemma4ForCausalLM"]),
            "layers that differ in head_dim (per_layer_config)",
        ),
        (T5Config(architectures=["LlamaForCausalLM"]), "model_type 't5', of which transformers has no causal"),
    ],
)
def test_a_kind_that_only_its_configuration_tells_is_refused(
    config: PreTrainedConfig, words: str, tmp_path: Path
) -> None:
    """Of some logits were wrong beyond a length; the others were tracebacks of transformers."""
    config.save_pretrained(tmp_path)
    edit_config(tmp_path, is_encoder_decoder=False)  # which would be refused first
    with pytest.raises(ModelNotUsable, match=re.escape(words)):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda folder: edit_config(folder, num_hidden_layers=0, layer_types=[]),
            "config.json has num_hidden_layers 0",
        ),
        (lambda folder: edit_config(folder, num_key_value_heads=0), "config.json has num_key_value_heads 0"),
        (lambda folder: edit_config(folder, max_position_embeddings=-1), "config.json has max_position_embeddings -1"),
        (lambda folder: edit_config(folder, pad_token_id=VOCABULARY_SIZE), "Padding_idx must be within"),
        (lambda folder: edit_config(folder, hidden_act="best"), "no model that can be made: KeyError('best')"),
        (lambda folder: edit_json(folder / GENERATION, eos_token_id="</s>"), "has eos_token_id '</s>'"),
        (lambda folder: edit_json(folder / GENERATION, eos_token_id=[7, None]), "has eos_token_id [7, None]"),
        (lambda folder: (folder / GENERATION).write_text("[]"), "generation_config.json is not a JSON object"),
        (lambda folder: halve(folder / GENERATION), "generation_config.json is not a JSON object"),
    ],
)
def test_numbers_with_which_no_model_can_be_made_are_refused_by_name(
    checkpoint: Path, damage: Callable[[Path], Any], words: str
) -> None:
    """Most were tracebacks. With half of the last file outputs ended at other tokens, and nobody said so."""
    damage(checkpoint)
    with pytest.raises(ModelNotUsable, match=re.escape(words)):
        load_model(str(checkpoint))


def test_an_unknown_built_in_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelNotUsable, match="builtin:target and builtin:draft are"):
        load_model("builtin:other")
    with pytest.raises(
        ModelNotUsable, match="heads 'builtin:other' is not built in; builtin:clover and builtin:eagle are"
    ):
        resolve_heads("builtin:other")


@pytest.mark.parametrize("name", HEADS)
def test_the_built_in_heads_are_for_the_built_in_target_and_weigh_little(name: str) -> None:
    folder = resolve_heads(f"builtin:{name}")
    heads = load_heads(f"builtin:{name}", load_model("builtin:target"))
    assert heads
    draft_count = {"clover": 3, "eagle": 5}[name]
    assert (heads.heads.kind, heads.heads.draft_count, heads.layer_count) == (name, draft_count, 1)
    assert (folder / WEIGHTS).stat().st_size < 4e6


def test_heads_that_are_not_built_in_are_a_folder() -> None:
    assert resolve_heads("trained/heads") == Path("trained/heads")


@pytest.mark.parametrize("in_files", [True, False])
def test_a_template_for_conversations_with_tools_is_read_from_wherever_it_stands(
    in_files: bool, checkpoint: Path
) -> None:
    """Newer checkpoints have a file for it, older ones a list in tokenizer_config.json."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())  # type: ignore[no-untyped-call]
    tokenizer.chat_template = {"default": "of all", "tool_use": "with tools", "rag": "with documents"}
    tokenizer.save_pretrained(checkpoint, save_jinja_files=in_files)
    files = read_tokenizer(find_checkpoint(str(checkpoint)))
    assert files and (files.chat_template, files.tool_template) == ("of all", "with tools")


def test_a_model_describes_itself(checkpoint: Path) -> None:
    model = load_model(str(checkpoint)).description
    assert model.architecture == "Qwen3ForCausalLM"
    assert (model.vocabulary_size, model.max_length) == (VOCABULARY_SIZE, MAX_LENGTH)
    assert model.end_token_ids == (END_TOKEN_ID,)
    assert (model.dtype, model.device) == ("float32", "cpu")
    assert model.tokenizer_fingerprint == ""


def test_dtype_is_the_checkpoints_unless_told(checkpoint: Path) -> None:
    assert load_model(str(checkpoint), "bfloat16").description.dtype == "bfloat16"
    edit_config(checkpoint, dtype="bfloat16")
    assert load_model(str(checkpoint)).description.dtype == "bfloat16"
    assert load_model(str(checkpoint), "float32").description.dtype == "float32"


@pytest.mark.parametrize(
    ("place", "name"),
    [(AutoModelForCausalLM, "from_pretrained"), (torch.nn.Module, "to"), (self_check, "_ragged_logits")],
)
def test_a_model_that_memory_does_not_hold_is_refused_in_words_of_its_own(
    place: Any, name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a model was reported as half written, as an unsupported kind, or as a call to try again."""

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(place, name, no_memory)
    with pytest.raises(StartupError, match="does not fit the memory of cpu; take a shorter --dtype") as refused:
        load_model(str(checkpoint))
    assert not isinstance(refused.value, ModelNotUsable)


def test_products_of_float32_are_float32_s_whatever_a_container_says(checkpoint: Path) -> None:
    """NVIDIA's containers set TF32, by which verified and plainly decoded rows may choose apart."""
    torch.set_float32_matmul_precision("high")
    try:
        load_model(str(checkpoint))
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")
