"""The architectures that are a plain decoder: where their norms stand, and which numbers of a head turn together.

All have rotary positions, a gated feed-forward and root mean square norms, with or without biases and norms of queries
and keys. It knows nothing of how they are computed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """Names of a layer's norms, None for none: before a block, and after it, before its sum with what went in."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None
    turns_neighbours: bool = False
    """Whether numbers 2i and 2i + 1 of a head turn together, and not i and i plus half of those that turn."""


FORMS = {
    "LlamaForCausalLM": Form(),
    "MistralForCausalLM": Form(),
    "Phi3ForCausalLM": Form(),
    "Qwen2ForCausalLM": Form(),
    "Qwen3ForCausalLM": Form(),
    "GlmForCausalLM": Form(turns_neighbours=True),
    "Glm4ForCausalLM": Form(
        after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm", turns_neighbours=True
    ),
    "Olmo2ForCausalLM": Form(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
}


def is_plain_decoder(module: object) -> bool:
    """Return whether a module's class is one of `FORMS`."""
    return type(module).__name__ in FORMS
