"""Slots on every rank: the first one's pool decides what lies where, and each has its own heads and layers of it."""

import torch

from paceline.engine.attention.paged import AttentionMaker
from paceline.engine.attention.strict import StrictAttention
from paceline.engine.interfaces import Attention, KvShape
from paceline.engine.plan import BatchPlan
from paceline.engine.ranks.group import Group
from paceline.engine.ranks.messages import Copy, LayOut
from paceline.engine.slots import KvSlots


class LedSlots(KvSlots):
    """The first rank's slots. Copies are told with the next pass, which is the first to need them."""

    def __init__(
        self, group: Group, shape: KvShape, page_count: int, page_tokens: int, attention: AttentionMaker
    ) -> None:
        with group.in_step():
            group.tell(LayOut(page_count, page_tokens, attention is StrictAttention))
            super().__init__(shape, group.least(page_count), page_tokens, attention)
        self._copies: list[Copy] = []

    def copy(self, target: int, source: int, count: int) -> None:
        super().copy(target, source, count)
        self._copies.append((target, source, count))

    def attention(self, plan: BatchPlan) -> Attention:
        return LedAttention(self, plan, super().attention(plan))

    def take_copies(self) -> list[Copy]:
        """Return the copies that the other ranks have not been told of."""
        copies, self._copies = self._copies, []
        return copies


class LedAttention:
    """The first rank's attention of a pass, with what the others need for theirs."""

    def __init__(self, slots: LedSlots, plan: BatchPlan, own: Attention) -> None:
        self.slots = slots
        self.plan = plan
        self.own = own

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return self.own.attend(layer, query, key, value, scaling)
