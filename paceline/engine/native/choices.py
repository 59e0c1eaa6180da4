"""Choices of many rows by the compiled rule, which knows temperatures and no filters; see `choices.h`."""

from array import array
from collections.abc import Sequence

import torch

from paceline.engine.native.kernels import Kernels
from paceline.engine.native.structures import ChooseCall, RankCall
from paceline.engine.noise import signed64
from paceline.engine.row_choice import RankedToken, is_plain
from paceline.types import ChoiceRule

MOST_RANKED = 64
"""As in `choices.h`: most tokens of a row that are ranked."""


class RowInputs:
    """Inputs to the choices of N rows but for their logits, as the functions read them."""

    def __init__(self, rules: Sequence[ChoiceRule], positions: Sequence[int]) -> None:
        self.positions = array("q", positions)
        self._seeds = array("q", [signed64(rule.seed) for rule in rules])
        self._temperatures = array("f", [rule.sampling.temperature for rule in rules])

    def call(self, count: int, size: int, logits: "array[int]", chosen: torch.Tensor) -> ChooseCall:
        """Return the call that puts the first `count` choices into `chosen`.

        `logits` says where each row is. Until the call is done the caller holds these two, and the inputs.
        """
        inputs = (one.buffer_info()[0] for one in (logits, self._seeds, self.positions, self._temperatures))
        return ChooseCall(count, size, *inputs, chosen.data_ptr())


class RankedPlaces:
    """Memory for the tokens that are ranked at some places, the choice first."""

    def __init__(self, place_count: int, count: int) -> None:
        assert count <= MOST_RANKED
        self.token_ids = torch.empty((place_count, count), dtype=torch.int64)
        self._shares = torch.zeros((place_count, count), dtype=torch.float64)

    def call(self, choose: ChooseCall) -> RankCall:
        """Return the call that ranks where `choose`, which is to write `token_ids`, would choose alone."""
        return RankCall(choose, self.token_ids.shape[1], self._shares.data_ptr())

    def places(self) -> list[list[RankedToken]]:
        """Return what was found; nothing at a place without a choice, or that was not reached."""
        pairs = zip(self.token_ids.tolist(), self._shares.tolist(), strict=True)
        return [[one for one in map(RankedToken, *pair) if one.probability > 0] for pair in pairs]


class NativeChooser:
    """`Chooser` and `Ranker`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def knows(self, rule: ChoiceRule) -> bool:
        return is_plain(rule)

    def choose(
        self, logits: Sequence[torch.Tensor], rules: Sequence[ChoiceRule], positions: Sequence[int]
    ) -> list[int]:
        whole = [one.float().contiguous() for one in logits]
        chosen = torch.empty(len(rules), dtype=torch.int64)
        rows, inputs = row_places(whole), RowInputs(rules, positions)
        self._kernels.choose(inputs.call(len(rules), whole[0].shape[1], rows, chosen))
        made: list[int] = chosen.tolist()
        return made

    def rank(
        self, logits: Sequence[torch.Tensor], rules: Sequence[ChoiceRule], positions: Sequence[int], count: int
    ) -> list[list[RankedToken]]:
        whole = [one.float().contiguous() for one in logits]
        found = RankedPlaces(len(rules), count)
        rows, inputs = row_places(whole), RowInputs(rules, positions)
        self._kernels.rank(found.call(inputs.call(len(rules), whole[0].shape[1], rows, found.token_ids)))
        return found.places()


def row_places(tensors: Sequence[torch.Tensor]) -> "array[int]":
    """Return where each row of some contiguous tensors [N, M] is in memory."""
    places = array("q")
    for one in tensors:
        row_bytes = one.shape[1] * one.itemsize
        places.extend(range(one.data_ptr(), one.data_ptr() + len(one) * row_bytes, row_bytes))
    return places
