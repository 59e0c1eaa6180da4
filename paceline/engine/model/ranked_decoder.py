"""A decoder over several ranks: each runs its heads of its layers, and the first one gets the logits.

Sums of ranks are added in one order whatever a pass holds, and stages pass on float32 as it is. So rows stay as
independent of each other as they are in one process, and over stages alone results are the same to the last bit.
"""

from contextlib import nullcontext

import torch

from paceline.engine.interfaces import Attention
from paceline.engine.model.compiled_decoder import CompiledDecoder
from paceline.engine.model.experts import experts_are_same, same_experts
from paceline.engine.model.module_decoder import ModuleDecoder
from paceline.engine.model.plain_decoder import PlainDecoder
from paceline.engine.model.shares import JoinedProduct, SummedProduct
from paceline.engine.ranks.group import Group
from paceline.engine.ranks.messages import RunPass
from paceline.engine.ranks.slots import LedAttention
from paceline.engine.slots import KvSlots
from paceline.engine.threads import most_threads
from paceline.engine.transfer import to_device


def join(plain: PlainDecoder, group: Group, vocabulary_size: int) -> None:
    """Have a decoder of one rank's share work out sums and logits together with the ranks of its stage."""
    if group.place.grid.share_count == 1:
        return
    for layer in plain.layers:
        layer.output, layer.down = SummedProduct(layer.output, group), SummedProduct(layer.down, group)
    if not group.place.stage:
        plain.head = JoinedProduct(plain.head, group, vocabulary_size)


class RankedDecoder:
    def __init__(self, own: PlainDecoder | CompiledDecoder | ModuleDecoder, group: Group) -> None:
        self._own = own
        self._group = group

    @property
    def kernels(self) -> str:
        count = self._group.place.grid.share_count
        # Stages change no bit, so a model over stages is the same model.
        return f"{self._own.kernels}, {count} shares" if count > 1 else self._own.kernels

    @property
    def shares_work(self) -> bool:
        return self._own.shares_work

    def is_row_independent(self, layout: str) -> bool:
        return self._own.is_row_independent(layout)

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Run a pass on all ranks, as the first one."""
        assert isinstance(attention, LedAttention)
        with self._group.in_step():
            copies = attention.slots.take_copies()
            numbers = token_ids[0].tolist(), wanted.tolist()
            self._group.tell(RunPass(attention.plan, copies, *numbers, most_threads(), experts_are_same()))
            logits = self._run(token_ids, positions, wanted, attention.own)
        assert logits is not None
        return logits

    @torch.inference_mode()
    def follow(self, told: RunPass, slots: KvSlots) -> None:
        """Run this rank's part of a pass over its own slots."""
        for copy in told.copies:
            slots.copy(*copy)
        device = slots.memory.device
        positions = [0] * len(told.token_ids)
        for span in told.plan.spans:
            positions[span.start : span.stop] = range(span.base_length, span.length)
        token_ids, places = (to_device([one], device) for one in (told.token_ids, positions))
        wanted = to_device(told.wanted, device, torch.long)
        with same_experts() if told.experts_are_same else nullcontext():
            self._run(token_ids, places, wanted, slots.attention(told.plan))

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor | None:
        """Run this rank's layers; return logits [W, V] in the first stage, whole in its first rank."""
        own, group, place = self._own, self._group, self._group.place
        if isinstance(own, ModuleDecoder):
            return own.logits(token_ids, positions, wanted, attention)
        token_count, size = token_ids.shape[1], own.hidden_size
        hidden = group.expect_passed(token_count, size)() if place.stage else own.embedded(token_ids)
        hidden = own.through(hidden, positions, wanted if place.is_last_stage else None, attention)
        if place.grid.stage_count > 1:
            group.pass_on(hidden)
            if place.stage:
                return None
            passed = group.expect_passed(len(wanted), size)
            with group.while_waiting():
                hidden = passed()
        return own.logits_of(hidden)
