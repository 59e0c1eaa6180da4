"""Rotary positions: equal to the model's own, from the first to the last served position, in every kind of pass."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.drafter import Drafter
from paceline.engine.loading import load_model
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.types import Proposal, ProposeRow
from tests.checkpoints import MAX_LENGTH, VOCABULARY_SIZE, write_model
from tests.fakes.device_kernels import models_of_a_device

ORIGINAL_LENGTH = 256
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": ORIGINAL_LENGTH},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
    "longrope": {
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}
TOKEN_IDS = tuple((7 * number) % VOCABULARY_SIZE for number in range(MAX_LENGTH))


def written(folder: Path, family: str, kind: str) -> str:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    own = {
        # Phi-3's configuration takes the original length from a separate field.
        "Phi3": {"original_max_position_embeddings": ORIGINAL_LENGTH},
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        # It hides nothing from the longest sequence that is served.
        "Starcoder2": {"sliding_window": ORIGINAL_LENGTH + 1},
    }
    return str(write_model(folder, family, rope_parameters=rope, **own.get(family, {})))


@pytest.mark.parametrize(
    ("family", "kind"), [*product(("Llama", "Qwen3Moe"), ROPES), ("Phi3", "longrope"), ("Starcoder2", "longrope")]
)
def test_every_position_that_is_served_has_the_models_own_logits(family: str, kind: str, tmp_path: Path) -> None:
    """Qwen3Moe and Starcoder2 go through their modules, the others through weights; the same pass has a short row."""
    folder = written(tmp_path, family, kind)
    model = load_model(folder)
    length = model.description.max_length
    assert length == (ORIGINAL_LENGTH if kind == "longrope" else MAX_LENGTH)
    module: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        expected = [module(input_ids=torch.tensor([TOKEN_IDS[:count]])).logits[0] for count in (length, 9)]
    runner = Runner(model, EngineOptions(kv_memory="1MiB", prefill_chunk_tokens=MAX_LENGTH))
    rows = [PackedRow(str(count), 0, TOKEN_IDS[:count], count - 1) for count in (length, 9)]
    for logits, own in zip(runner.forward(rows), expected, strict=True):
        assert isinstance(logits, torch.Tensor)
        assert torch.allclose(logits, own, rtol=1e-3, atol=1e-3)


def test_padding_may_lie_beyond_the_last_position(tmp_path: Path) -> None:
    """Passes of fixed shapes pad rows to a common width, even rows of a sequence at its full length."""
    with models_of_a_device():
        model = load_model(written(tmp_path, "Llama", "default"))
    found = []
    for fixed_shapes in (True, False):
        options = EngineOptions(kv_memory="1MiB", prefill_chunk_tokens=MAX_LENGTH, fixed_shapes=fixed_shapes)
        runner = Runner(model, options)
        runner.forward([PackedRow("full", 0, TOKEN_IDS[:-5]), PackedRow("short", 0, TOKEN_IDS[:9])])
        drafts = Drafter(runner).propose(
            [ProposeRow("full", MAX_LENGTH - 5, TOKEN_IDS[-5:-3], 4), ProposeRow("short", 9, (1, 2, 3, 4, 5), 4)]
        )
        assert all(isinstance(one, Proposal) for one in drafts)
        rows = [PackedRow("full", MAX_LENGTH - 1, TOKEN_IDS[-1:]), PackedRow("short", 9, (1, 2, 3, 4, 5, 6), 5)]
        found.append((drafts, runner.forward(rows)))
    (fixed_drafts, fixed), (drafts, ragged) = found
    assert fixed_drafts == drafts
    for one, other in zip(fixed, ragged, strict=True):
        assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)
