"""The way of a packed row through a model: by the model's own modules, or straight through their weights.

Architectures known to be a plain decoder go the second way, with the same operations on the same weights, or with
a backend's kernels. `self_check` compares the result with the model's own forward at load.
"""

from typing import Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from paceline.engine.backend import Backend
from paceline.engine.interfaces import Attention
from paceline.engine.model.compiled_decoder import CompiledDecoder, can_compile_decoder
from paceline.engine.model.forms import is_plain_decoder
from paceline.engine.model.linear import least_packed_bytes, pack_layers
from paceline.engine.model.module_decoder import ModuleDecoder
from paceline.engine.model.native_decoder import NativeDecoder, can_record_decoder
from paceline.engine.model.plain_decoder import PlainDecoder
from paceline.engine.model.planned_shares import join_planned, take_planned_share
from paceline.engine.model.ranked_decoder import RankedDecoder, join
from paceline.engine.model.shares import take_share
from paceline.engine.model.taps import Taps
from paceline.engine.ranks.group import Group


class Decoder(Protocol):
    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Run one packed row: `token_ids` and `positions` [1, T], `wanted` [W] indices into T. Return [W, V]."""
        ...

    @property
    def kernels(self) -> str:
        """Name what computes, as it was chosen at load."""
        ...

    @property
    def shares_work(self) -> bool:
        """Whether its kernels decide by themselves how many threads each operation is worth."""
        ...

    def is_row_independent(self, layout: str) -> bool:
        """Return whether over a cache of this layout no result depends on the other rows of a call, to the last bit."""
        ...


@runtime_checkable
class FeatureDecoder(Decoder, Protocol):
    """A decoder that gives its features too, which are what goes into its last norm."""

    @property
    def hidden_size(self) -> int: ...

    def logits_and_features(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        attention: Attention,
        taps: Taps | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one packed row as `logits` does; return its result, and the features [W, H] of the wanted tokens.

        With `taps` the features are those of all tokens, with what was tapped beside them: [T, (1 + layers) * H]. The
        next pass of this thread may overwrite them.
        """
        ...


def make_decoder(module: PreTrainedModel, backend: Backend) -> Decoder:
    """Make the best decoder for the module, which is used up: the decoder takes its weights."""
    if not is_plain_decoder(module):
        pack_layers(module)
        return ModuleDecoder(module)
    plain, kernels = PlainDecoder(module, backend, least_packed_bytes(module)), backend.kernels
    if not kernels or not can_compile_decoder(plain, kernels):
        return plain
    return NativeDecoder(plain, kernels) if can_record_decoder(kernels, plain) else CompiledDecoder(plain, kernels)


def make_ranked_decoder(module: PreTrainedModel, backend: Backend, group: Group) -> RankedDecoder:
    """Make the decoder of this rank's share of a divisible module, which is used up. All ranks call it."""
    share = _plain_share if is_plain_decoder(module) else _planned_share
    return RankedDecoder(share(module, backend, group), group)


def _plain_share(module: PreTrainedModel, backend: Backend, group: Group) -> PlainDecoder | CompiledDecoder:
    packed_bytes, vocabulary_size = least_packed_bytes(module), module.config.vocab_size
    take_share(module, group.place)
    module.to(group.device)  # type: ignore[arg-type]
    plain, kernels = PlainDecoder(module, backend, packed_bytes), backend.kernels
    join(plain, group, vocabulary_size)
    group.meet()
    # Results are those of one process only if all ranks compute in one way.
    can_compile = group.least(kernels is not None and can_compile_decoder(plain, kernels))
    return CompiledDecoder(plain, kernels) if kernels and can_compile else plain


def _planned_share(module: PreTrainedModel, backend: Backend, group: Group) -> ModuleDecoder:
    vocabulary_size = module.config.vocab_size
    take_planned_share(module, group.place)
    module.to(group.device)  # type: ignore[arg-type]
    pack_layers(module)
    join_planned(module, group, vocabulary_size)  # after packing, which replaces layers
    return ModuleDecoder(module)
