"""Model families that the engine runs, and the names by which it refuses others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.engine.attention.paged import PagedAttention
from paceline.engine.loading import load_model
from paceline.engine.native import find_kernels
from paceline.engine.options import EngineOptions
from paceline.engine.runner import Runner
from paceline.engine.self_check import CACHED_COUNT, LENGTHS
from paceline.errors import ModelNotUsable
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.types import Verdict, VerifyRow
from target_service.verifier import Verifier
from tests.checkpoints import END_TOKEN_ID, EXPERTS, MAX_LENGTH, VOCABULARY_SIZE, edit_config, write_model

PROMPTS = ((9, 10, 11), tuple(range(20, 61)), (300,))
OUTPUT_COUNT = 12
FULL = ["full_attention", "full_attention"]
FULL_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("family", "changes", "decoder"),
    [
        ("Llama", {}, "CompiledDecoder float32"),
        ("Llama", {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": True}, "PlainDecoder float32"),
        ("Llama", {"num_key_value_heads": 4, "attention_bias": True}, "CompiledDecoder float32"),
        ("Qwen3", {"tie_word_embeddings": True}, "CompiledDecoder float32"),
        ("Glm4", {}, "CompiledDecoder float32"),
        ("Glm4", {"attention_bias": True, "rope_parameters": FULL_ROTATION}, "CompiledDecoder float32"),
        ("Glm", {}, "CompiledDecoder float32"),
        ("Qwen2", {}, "CompiledDecoder float32"),
        ("Phi3", {}, "CompiledDecoder float32"),
        ("Phi3", {"rope_parameters": FULL_ROTATION | {"partial_rotary_factor": 0.5}}, "CompiledDecoder float32"),
        ("Mistral", {"sliding_window": None}, "CompiledDecoder float32"),
        # Windows that hide nothing, as those of Phi-3.5 and Phi-4-mini.
        ("Phi3", {"sliding_window": MAX_LENGTH}, "CompiledDecoder float32"),
        ("Starcoder2", {"sliding_window": 2 * MAX_LENGTH}, "ModuleDecoder"),
        # These do otherwise without a window, and cannot be without one.
        ("Exaone4", {"sliding_window": MAX_LENGTH, "sliding_window_pattern": 1}, "ModuleDecoder"),
        ("Cohere2", {"sliding_window": MAX_LENGTH, "layer_types": FULL}, "ModuleDecoder"),
        ("ExaoneMoe", {**EXPERTS, "sliding_window": MAX_LENGTH, "layer_types": FULL}, "ModuleDecoder"),
        # Its modules view what attention gives in another shape.
        ("Afmoe", {**EXPERTS, "sliding_window": MAX_LENGTH, "layer_types": FULL}, "ModuleDecoder"),
        ("Olmo2", {}, "PlainDecoder float32"),
        ("Qwen3Moe", EXPERTS, "ModuleDecoder"),
    ],
)
def test_a_family_equals_hugging_face_when_drafts_are_right_wrong_and_absent(
    family: str, changes: dict[str, Any], decoder: str, tmp_path: Path
) -> None:
    write_model(tmp_path, family, **changes)
    reference = HuggingFaceReference(str(tmp_path), "float32")
    expected = [reference.generate(prompt, OUTPUT_COUNT) for prompt in PROMPTS]
    model = load_model(str(tmp_path))
    if find_kernels():
        assert model.decoder.kernels.partition(",")[0] == decoder
    verifier = Verifier(Runner(model, EngineOptions(kv_memory="4MiB", page_tokens=4)))
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    cached = [0] * len(PROMPTS)
    for number in range(OUTPUT_COUNT):
        rows = []
        for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
            if len(output) >= len(expected[index]):
                continue
            token_ids = (*prompt, *output)[cached[index] :]
            right = expected[index][len(output) : len(output) + (number + index) % 4]
            rows.append((index, VerifyRow(str(index), cached[index], token_ids, (*right, 5))))
        if not rows:
            break
        for (index, row), verdict in zip(rows, verifier.verify([row for _, row in rows]), strict=True):
            assert isinstance(verdict, Verdict)
            outputs[index] += [*row.draft_token_ids[: verdict.accepted_count], verdict.next_token_id]
            cached[index] = verdict.cached_length
    assert [output[: len(one)] for output, one in zip(outputs, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("Mistral", {"sliding_window": 64}, "sliding-window attention (sliding_window is 64)"),
        ("Llama", {"sliding_window": "64"}, "sliding-window attention (sliding_window is 64)"),
        ("Phi3", {"sliding_window": MAX_LENGTH - 1}, "sliding-window attention (sliding_window is 511)"),
        ("Gemma2", {}, "soft-caps its attention scores"),
        ("DeepseekV3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}, "multi-head latent attention"),
        ("Bloom", {}, "does not call transformers' attention interface"),
        ("Mamba", {}, "only full_attention runs"),
        # It hides nothing from the sequences of the check at load, so that their logits were equal.
        ("Doge", {"keep_window_size": 64}, "uses an attention mask of its own"),
    ],
)
def test_another_kind_of_attention_is_refused_by_name(
    family: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_model(tmp_path, family, **changes)
    with pytest.raises(ModelNotUsable) as refusal:
        load_model(str(tmp_path))
    assert words in refusal.value.message


def test_a_window_that_only_the_architectures_default_sets_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "Mistral", sliding_window=None, max_position_embeddings=8192)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotUsable, match="sliding_window is 4096"):
        load_model(str(tmp_path))


def test_a_field_that_an_architecture_does_not_read_turns_no_window_off(tmp_path: Path) -> None:
    """Qwen's `use_sliding_window` in Mistral's file: beyond the window most tokens were other ones than the model's."""
    write_model(tmp_path, "Mistral", sliding_window=64)
    edit_config(tmp_path, use_sliding_window=False)
    with pytest.raises(ModelNotUsable, match="sliding_window is 64"):
        load_model(str(tmp_path))


def test_a_window_that_is_turned_off_where_the_architecture_has_none_is_none(tmp_path: Path) -> None:
    """Converted files keep both fields of the architecture that they came from."""
    write_model(tmp_path, "Llama")
    edit_config(tmp_path, sliding_window=64, use_sliding_window=False)
    assert load_model(str(tmp_path))


def test_a_model_that_differs_from_its_own_attention_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "Llama")
    attend = "paceline.engine.attention.paged.PagedAttention.attend"
    monkeypatch.setattr(attend, lambda self, layer, query, key, value, scaling: query)
    with pytest.raises(ModelNotUsable, match="gives other logits through the engine than by itself"):
        load_model(str(tmp_path))


def attending_wrongly(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have attention give what `change` makes of each pass's result [H, T, D]."""
    attend = PagedAttention.attend

    def wrong(attention: PagedAttention, *given: Any) -> torch.Tensor:
        return change(attend(attention, *given))

    monkeypatch.setattr(PagedAttention, "attend", wrong)


def test_what_is_no_number_in_one_sequence_of_the_check_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest difference was looked for by Python's `max`, which passes over NaN unless it comes first."""
    write_model(tmp_path, "Llama")

    def of_the_second(attended: torch.Tensor) -> torch.Tensor:
        attended[:, CACHED_COUNT:] *= float("nan") if attended.shape[1] == CACHED_COUNT + LENGTHS[1] else 1
        return attended

    attending_wrongly(monkeypatch, of_the_second)
    with pytest.raises(ModelNotUsable, match="off by nan of the largest"):
        load_model(str(tmp_path))


def write_twin_experts(folder: Path) -> Path:
    """Write a mixture of pairs of experts that differ, and that routers find as good as each other.

    Their rows of a router are a last bit of bfloat16 apart in each number.
    """
    write_model(folder, "Qwen3Moe", **EXPERTS | {"num_experts_per_tok": 1})
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(6)
    for name, one in tensors.items():
        if name.endswith("mlp.gate.weight"):
            one[1::2] = one[::2] * (1 + 2**-8 * torch.randint(-1, 2, one[::2].shape))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_experts_between_which_the_last_bits_decide_are_no_reason_to_refuse_a_mixture(tmp_path: Path) -> None:
    """Passes round otherwise than the model by itself, so near ties chose other experts; the model was refused."""
    model = load_model(str(write_twin_experts(tmp_path)), "bfloat16")
    assert model.mixes_experts


@pytest.mark.parametrize(
    "change",
    [
        lambda attended: torch.zeros_like(attended),
        lambda attended: attended * 2,
        lambda attended: attended.roll(1, 0),
        lambda attended: attended.roll(1, 1),
    ],
    ids=["nothing", "twice as much", "other heads", "other tokens"],
)
def test_a_mixture_that_differs_from_its_own_attention_is_refused_whatever_experts_are_chosen(
    change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attending_wrongly(monkeypatch, change)
    with pytest.raises(ModelNotUsable, match="gives other logits through the engine than by itself"):
        load_model(str(write_twin_experts(tmp_path)), "bfloat16")


def test_end_tokens_are_the_checkpoints(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3")
    assert load_model(str(tmp_path)).description.end_token_ids == (END_TOKEN_ID,)


def test_end_tokens_that_no_output_can_have_are_none(tmp_path: Path) -> None:
    """The target refused every request that was not greedy, for a field that its client had never sent."""
    write_model(tmp_path, "Llama", eos_token_id=[END_TOKEN_ID, VOCABULARY_SIZE, -1])
    assert load_model(str(tmp_path)).description.end_token_ids == (END_TOKEN_ID,)
