"""Passes by the kernels of a GPU, interpreted: what a row gets depends on no chunk, neighbour, padding or draft."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.drafter import Drafter
from paceline.engine.fixed_shapes import BlockPasses
from paceline.engine.loading import load_model
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.types import Proposal, ProposeRow, Verdict, VerifyRow
from target_service.verifier import Verifier
from tests.checkpoints import FAMILIES, write_model
from tests.tools import kernels_of_a_gpu

# The interpreter's numpy warns of hashes that overflow, as they are to.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
PROMPT = tuple(range(20, 38))
"""Longer than recorded passes take, and no longer: the interpreter takes its time for every token."""
STRICT = EngineOptions(kv_memory="1MiB", page_tokens=4, numerics="strict")


def runner(folder: Path, options: EngineOptions, dtype: str, *, checked: bool = False) -> Runner:
    with kernels_of_a_gpu(checked=checked):
        return Runner(load_model(str(folder), dtype), options)  # type: ignore[arg-type]


def written(folder: Path, family: str) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 70, "num_hidden_layers": 1}
    return write_model(folder, family, num_attention_heads=2, num_key_value_heads=1, **sizes)


CASES = [
    pytest.param(family, dtype, marks=() if (family, dtype) == ("Glm4", "bfloat16") else pytest.mark.long)
    for family in FAMILIES
    for dtype in ("float32", "bfloat16", "float16")
]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_logits_are_equal_to_the_last_bit_in_any_chunks_among_any_rows(tmp_path: Path, family: str, dtype: str) -> None:
    running = runner(written(tmp_path, family), STRICT, dtype)
    assert isinstance(running.passes, BlockPasses)
    (whole,) = running.forward([PackedRow("whole", 0, PROMPT, len(PROMPT) - 1)])
    assert isinstance(whole, torch.Tensor)
    length = 0
    for count, other in ((1, ()), (3, (9,)), (13, PROMPT[:17]), (1, (7, 8, 9))):
        own = PackedRow("own", length, PROMPT[length : length + count], count - 1)
        neighbours = [PackedRow(f"after {length}", 0, other)] if other else []
        logits = running.forward([*neighbours, own])[-1]
        assert isinstance(logits, torch.Tensor)
        assert torch.equal(logits, whole[length : length + count])
        length += count
    assert length == len(PROMPT)


def test_float32_logits_are_the_model_s_own(tmp_path: Path) -> None:
    folder = written(tmp_path, "Glm4")
    with torch.inference_mode():
        own = AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.tensor([PROMPT])).logits[0]
    (logits,) = runner(folder, STRICT, "float32", checked=True).forward([PackedRow("a", 0, PROMPT, len(PROMPT) - 1)])
    assert isinstance(logits, torch.Tensor)
    torch.testing.assert_close(logits, own, rtol=1e-3, atol=1e-3)


def test_drafts_of_the_same_model_are_all_accepted(tmp_path: Path) -> None:
    """Drafts are made one at a time and verified at once, so one bit of difference could show."""
    running = runner(written(tmp_path, "Qwen3"), STRICT, "bfloat16")
    (proposal,) = Drafter(running).propose([ProposeRow("draft", 0, PROMPT[:3], 4)])
    assert isinstance(proposal, Proposal)
    (verdict,) = Verifier(running).verify([VerifyRow("target", 0, PROMPT[:3], proposal.draft_token_ids)])
    assert isinstance(verdict, Verdict)
    assert verdict.accepted_count == 4
