"""Heads made ready for a loaded target: their products are the backend's, and their layers come behind the target's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.builtin import resolve_heads
from paceline.engine.heads.eagle_steps import EagleSteps, eagle_steps
from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.layers import HeadLayers, with_kernels
from paceline.engine.heads.reading import read_heads
from paceline.engine.heads.vocabularies import PartialHead
from paceline.engine.model.compiled_decoder import CompiledDecoder
from paceline.engine.model.loader import convert
from paceline.engine.model.model import LoadedModel
from paceline.engine.model.plain_decoder import PlainDecoder
from paceline.engine.model.quantized_layers import quantize_linears
from paceline.errors import ModelNotUsable
from paceline.process.variables import NO_HEADS


@dataclass(frozen=True)
class LoadedHeads:
    heads: HeadsModule
    target: PlainDecoder
    """Whose embeddings they share."""
    head: Callable[[Tensor], Tensor]
    """Turns what they give, [M, H], into logits [M, V]: the target's head, or their own."""
    layers: HeadLayers | None
    layer_count: int
    """Layers of keys and values of their own."""
    steps: EagleSteps | None
    """Makes all drafts of some sequences at once, where that can be."""

    @property
    def tapped_count(self) -> int:
        """Results of the target's layers that they read of every token, the last one's among them."""
        return 1 + len(self.heads.tapped_layers) if self.layers else 0


def load_heads(setting: str, model: LoadedModel) -> LoadedHeads | None:
    """Read what `--heads` names, for a loaded target. Raise ModelNotUsable, which says why they do not fit."""
    if setting == NO_HEADS:
        return None
    heads, config = read_heads(resolve_heads(setting))
    return fitted(heads, config, model)


def fitted(heads: HeadsModule, config: Any, model: LoadedModel) -> LoadedHeads:
    """Fit heads that were made for a target with this configuration; this uses them up. Raise ModelNotUsable."""
    decoder = model.decoder
    plain = decoder.plain if isinstance(decoder, CompiledDecoder) else decoder
    if not isinstance(plain, PlainDecoder):
        raise ModelNotUsable(
            f"--heads is set, and {model.description.architecture} runs through modules of its own, which give no "
            "features; start with --heads none"
        )
    _check_size("hidden_size", config.hidden_size, plain.embedding.shape[1])
    shape, body = model.kv_shape, heads.body
    layer_count = len(body.layers) if body else 0
    if body:
        _check_size("num_key_value_heads", body.config.num_key_value_heads, shape.kv_head_count)
        _check_size("num_attention_heads", body.config.num_attention_heads, shape.head_count)
        _check_size("head_dim", body.layers[0].self_attn.head_dim, shape.head_size)
    convert(heads.requires_grad_(False).to(device=shape.device), shape.dtype)
    heads.take_target(plain.norm, shape.layer_count)
    _check_taps(heads.tapped_layers, shape.layer_count)
    if heads.head:
        _check_token_ids(heads.token_ids, model.description.vocabulary_size)
    if model.description.quantization:
        quantize_linears(heads, rounds_rows=model.description.rounds_rows)
    heads.body = None  # its layers are taken apart from the rest
    layers = _layers(heads, body, model) if body else None
    with_kernels(heads, model.backend)
    head = PartialHead(heads.head, heads.token_ids, model.description.vocabulary_size) if heads.head else plain.head
    return LoadedHeads(heads, plain, head, layers, layer_count, eagle_steps(heads, plain, layers))


def _layers(heads: HeadsModule, body: Any, model: LoadedModel) -> HeadLayers:
    return HeadLayers(
        body,
        model.kv_shape.layer_count,
        model.description.max_length,
        model.backend,
        reads_embeddings=heads.reads_embeddings,
    )


def _check_taps(tapped_layers: Sequence[int], layer_count: int) -> None:
    if not all(0 <= one < layer_count for one in tapped_layers):
        raise ModelNotUsable(
            f"--heads reads what goes into layers {', '.join(map(str, tapped_layers))}, and the target has "
            f"{layer_count} layers; give heads that were made for this target"
        )


def _check_token_ids(token_ids: Tensor, vocabulary_size: int) -> None:
    least, most = int(token_ids.min()), int(token_ids.max())
    if not 0 <= least <= most < vocabulary_size:
        raise ModelNotUsable(
            f"--heads drafts tokens {least} to {most}, outside the target's vocabulary [0, {vocabulary_size}): they "
            "were made for another; train heads for this target, or start with --heads none"
        )


def _check_size(name: str, found: int, needed: int) -> None:
    if found != needed:
        raise ModelNotUsable(
            f"--heads has {name} {found}, and the target {needed}: they were made for another; train heads for this "
            "target, or start with --heads none"
        )
