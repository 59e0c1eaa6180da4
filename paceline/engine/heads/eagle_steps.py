"""EAGLE's drafts on a CPU: one call of the library takes features in and drafts all tokens of some sequences.

It owns the order of a step's calls, whose arithmetic is that of `Eagle`. It knows nothing of the cache and of who asks.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from paceline.engine.attention.paged import PagedAttention
from paceline.engine.heads.eagle import Eagle
from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.layers import HeadLayers, KernelNorm, ProductLayer
from paceline.engine.interfaces import Attention
from paceline.engine.model.compiled_layers import CompiledLayers
from paceline.engine.model.plain_decoder import PlainDecoder
from paceline.engine.model.programs import LogitsPass, Programs, can_read, rows_of
from paceline.engine.native import Kernels, PackedWeight, PassRows, RowInputs
from paceline.types import ChoiceRule


def eagle_steps(heads: HeadsModule, target: PlainDecoder, layers: HeadLayers | None) -> "EagleSteps | None":
    """Return the steps of heads that are ready for passes; None where the library cannot make them."""
    if not isinstance(heads, Eagle) or not layers or not layers.recordable or not isinstance(heads.fc, ProductLayer):
        return None
    products = heads.fc.product, target.head
    if not all(isinstance(one, PackedWeight) and one.dtype == target.dtype for one in products):
        return None
    return EagleSteps(heads, target, *layers.recordable)


class EagleSteps:
    def __init__(self, heads: Eagle, target: PlainDecoder, layers: CompiledLayers, kernels: Kernels) -> None:
        self._heads, self._target, self._kernels = heads, target, kernels
        self._programs = Programs(partial(_Recorded, heads, target, layers, kernels))

    def can_read(self, attention: Attention) -> TypeGuard[PagedAttention]:
        return can_read(attention, self._target.dtype)

    def drafts(
        self,
        token_ids: Sequence[int],
        features: Tensor,
        attention: PagedAttention,
        rules: Sequence[ChoiceRule],
        counts: Sequence[int],
    ) -> list[list[int]]:
        """Take in tokens [T] with the features [T, H] of those before them; draft `counts` tokens after the first rows.

        The first ones want the most. `is_plain` holds of the rules. Return fewer drafts where one cannot be chosen. The
        cache has room for all but the last.
        """
        drafting, others = attention.spans[: len(counts)], attention.spans[len(counts) :]
        wanted = torch.tensor([span.stop - 1 for span in drafting])
        later_counts = [*(count - 1 for count in counts), *(0 for _ in others)]
        begun = self._begun(token_ids, features, attention, wanted, later_counts)
        # A sequence's last token has no place in the layers yet.
        inputs = RowInputs(rules, [span.length + 1 for span in drafting])
        return begun.steps(len(token_ids), counts, inputs)

    def take_in(self, token_ids: Sequence[int], features: Tensor, attention: PagedAttention) -> None:
        """Take in tokens [T] with the features [T, H] of those before them."""
        wanted = torch.empty(0, dtype=torch.int64)
        self._begun(token_ids, features, attention, wanted).run(len(token_ids), 0)

    def _begun(
        self,
        token_ids: Sequence[int],
        features: Tensor,
        attention: PagedAttention,
        wanted: Tensor,
        later_counts: Sequence[int] = (),
    ) -> "_Recorded":
        """Return the program of a pass, all but run. Sequences may grow by `later_counts` tokens in it."""
        rows = rows_of(self._kernels, attention, len(self._target.rotary.cos), wanted, later_counts)
        begun, count = self._programs.begun(len(token_ids), wanted, attention, rows, None), len(token_ids)
        begun.token_ids[:count] = torch.tensor(token_ids)
        assert self._heads.norm
        begun.states[:count] = self._heads.norm(features)
        return begun


class _Recorded(LogitsPass):
    def __init__(
        self,
        heads: Eagle,
        target: PlainDecoder,
        layers: CompiledLayers,
        kernels: Kernels,
        attention: PagedAttention,
        rows: PassRows,
        capacity: int,
        kind: None,
    ) -> None:
        assert isinstance(target.head, PackedWeight) and isinstance(heads.fc, ProductLayer)
        super().__init__(target.head, kernels, attention, rows, capacity)
        size, dtype = target.hidden_size, target.dtype
        entering = torch.zeros((capacity, 2 * size), dtype=dtype)
        embedded, self.states = entering[:, :size], entering[:, size:]
        """The states behind which tokens are drafted: each pass leaves those that the next one reads."""
        with self.recording():
            self._embed(heads, target, embedded)
            hidden, added = layers.through(heads.fc.product(entering), self.wanted, attention, rows)
            last = heads.output_norm if isinstance(heads.output_norm, KernelNorm) else None
            norm, read = last or target.norm, torch.empty((capacity, size), dtype=dtype)
            kernels.add_and_norm(hidden, added, norm.weight, norm.epsilon, dtype, lambda shape, dtype: read)
            kernels.copied(hidden, dtype, lambda shape, dtype: self.states)
            if not last:  # the head reads the states as they are
                kernels.copied(hidden, dtype, lambda shape, dtype: read)
            self.record_logits(read)

    def _embed(self, heads: Eagle, target: PlainDecoder, embedded: Tensor) -> None:
        """Put the embeddings of the tokens in their place."""
        kernels, norm = self._kernels, heads.embedded_norm
        if not isinstance(norm, KernelNorm):
            kernels.take(target.embedding, self.token_ids, lambda shape, dtype: embedded)
            return
        taken = kernels.take(target.embedding, self.token_ids, dtype=torch.float32)
        normed = kernels.add_and_norm(taken, None, norm.weight, norm.epsilon, target.dtype)
        kernels.copied(normed, target.dtype, lambda shape, dtype: embedded)
