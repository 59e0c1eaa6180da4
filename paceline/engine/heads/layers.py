"""The layers of heads in a pass: their keys and values lie in the pool, behind the target's."""

from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from paceline.engine.attention.paged import PagedAttention
from paceline.engine.backend import Backend, LayerKernels, Product
from paceline.engine.heads.parts import Norm
from paceline.engine.interfaces import Attention
from paceline.engine.model.compiled_layers import CompiledLayers, can_compile
from paceline.engine.model.forms import FORMS
from paceline.engine.model.linear import least_packed_bytes, take
from paceline.engine.model.plain_layer import Layer
from paceline.engine.model.programs import Programs, RecordedPass, can_read, can_record, rows_of
from paceline.engine.model.quantized_layers import QuantizedLinear
from paceline.engine.model.rotary import Rotary
from paceline.engine.native import Kernels, PassRows
from paceline.errors import ModelNotUsable


class HeadLayers:
    def __init__(
        self, body: Any, first_number: int, max_length: int, backend: Backend, *, reads_embeddings: bool
    ) -> None:
        """Take the layers of transformers' model `body`; `first_number` is that of the first one in the pool.

        Raise ModelNotUsable for an architecture that is no plain decoder.
        """
        self._reads_embeddings = reads_embeddings
        name = type(body).__name__.replace("Model", "ForCausalLM")
        if name not in FORMS:
            raise ModelNotUsable(
                f"--heads has a layer of {name}, and layers of plain decoders alone are run ({', '.join(FORMS)}); give "
                "other heads, or start with --heads none"
            )
        form = FORMS[name]
        if isinstance(getattr(body.layers[0], "input_layernorm", None), nn.Identity):  # not all have one
            form = replace(form, before_attention=None)
        taken = partial(take, backend=backend, packed_bytes=least_packed_bytes(body))
        like = torch.empty(0, device=body.layers[0].post_attention_layernorm.weight.device)
        self._rotary = Rotary(body.rotary_emb, like, max_length, body.layers[0].self_attn.head_dim)
        self._layers = [
            Layer(layer, number, form, self._rotary.turned_size, taken)
            for number, layer in enumerate(body.layers, first_number)
        ]
        self._kernels = backend.kernels if backend.kernels and can_compile(self._layers, backend.kernels) else None
        self._compiled = CompiledLayers(self._layers, self._rotary, self._kernels) if self._kernels else None
        self._recorded: _RecordedLayers | None = None
        if self.recordable:
            size, dtype = body.config.hidden_size, self._layers[0].dtype
            self._recorded = _RecordedLayers(*self.recordable, size, len(self._rotary.cos), dtype)

    @property
    def recordable(self) -> tuple[CompiledLayers, Kernels] | None:
        """The layers and the kernels that can note their passes, if there are such."""
        # What is read beside is put in its place by torch.
        if not self._compiled or self._reads_embeddings or not can_record(self._kernels, self._layers):
            return None
        return self._compiled, self._kernels

    @property
    def is_compiled(self) -> bool:
        """Whether a backend's kernels run them."""
        return self._compiled is not None

    def __call__(self, hidden: Tensor, positions: Tensor, attention: Attention, wanted: Tensor) -> Tensor:
        """Turn [T, H] at positions [T], which this uses up, into [W, H] for the tokens `wanted` [W].

        With `reads_embeddings` it turns [T, 2 H], of which the first half is beside the rest.
        """
        if self._recorded and self._recorded.can_read(attention):
            return self._recorded(hidden, attention, wanted)
        beside: Tensor | None = None
        if self._reads_embeddings:
            beside, hidden = (half.contiguous() for half in hidden.chunk(2, dim=1))
        rows = self._kernels.rows_of(attention) if self._kernels else None
        if self._compiled and rows is not None:
            hidden, added = self._compiled.through(hidden, wanted, attention, rows, beside=beside)
            return hidden.add_(added)
        turn, last = self._rotary.at(positions), self._layers[-1]
        for layer in self._layers:
            hidden = layer(hidden, turn, attention, wanted if layer is last else None, beside)
            beside = None
        return hidden


class _RecordedLayers:
    """Layers on a CPU, all of whose kernels are called at once."""

    def __init__(
        self, layers: CompiledLayers, kernels: Kernels, size: int, position_count: int, dtype: torch.dtype
    ) -> None:
        self._kernels, self._position_count, self._dtype = kernels, position_count, dtype
        self._programs = Programs(partial(_Recorded, layers, kernels, size))

    def can_read(self, attention: Attention) -> TypeGuard[PagedAttention]:
        return can_read(attention, self._dtype)

    def __call__(self, hidden: Tensor, attention: PagedAttention, wanted: Tensor) -> Tensor:
        rows = rows_of(self._kernels, attention, self._position_count, wanted)
        return self._programs.begun(len(hidden), wanted, attention, rows, None)(hidden, len(wanted))


class _Recorded(RecordedPass):
    def __init__(
        self,
        layers: CompiledLayers,
        kernels: Kernels,
        size: int,
        attention: PagedAttention,
        rows: PassRows,
        capacity: int,
        kind: None,
    ) -> None:
        super().__init__(kernels, attention, rows, capacity)
        self._entering = torch.empty((capacity, size))
        with self.recording():
            self._hidden, self._added = layers.through(self._entering, self.wanted, attention, rows)

    def __call__(self, hidden: Tensor, wanted_count: int) -> Tensor:
        self._entering[: len(hidden)] = hidden
        self.run(len(hidden), wanted_count)
        return self._hidden[:wanted_count] + self._added[:wanted_count]


class KernelNorm(nn.Module):
    """Takes the place of a norm in a pass."""

    def __init__(self, norm: Norm, kernels: LayerKernels) -> None:
        super().__init__()
        self.weight, self.epsilon, self._kernels = norm.weight.float(), norm.epsilon, kernels

    def forward(self, values: Tensor) -> Tensor:
        rows = values.float().reshape(-1, len(self.weight)).contiguous()
        return self._kernels.add_and_norm(rows, None, self.weight, self.epsilon).view(values.shape)


class ProductLayer(nn.Module):
    """Takes the place of a linear layer in a pass."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, values: Tensor) -> Tensor:
        return self.product(values)


def with_kernels(module: nn.Module, backend: Backend) -> None:
    """Let a backend do the products of all linear layers of a module, and its norms, in their places."""
    packed_bytes = least_packed_bytes(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, QuantizedLinear):
                setattr(parent, name, ProductLayer(take(child, backend=backend, packed_bytes=packed_bytes)))
            elif type(child) is Norm and backend.kernels:
                setattr(parent, name, KernelNorm(child, backend.kernels))
