"""How the built-in pair is made."""

import torch

from training.draft import DRAFT_SHAPE, widened
from training.loop import Shape, new_model
from training.tokenizer import END, PAD


def test_a_widened_draft_says_what_it_said_before() -> None:
    torch.manual_seed(0)
    vocabulary = {PAD: 0, END: 1, **{str(number): number for number in range(2, 64)}}
    narrow = new_model(Shape(hidden_size=32, layer_count=2, head_count=2, kv_head_count=1, mlp_size=48), vocabulary)
    wide = widened(narrow)
    assert wide.config.intermediate_size == DRAFT_SHAPE.mlp_size
    token_ids = torch.arange(40)[None]
    with torch.inference_mode():
        assert torch.allclose(wide(token_ids).logits, narrow(token_ids).logits, atol=1e-5)
