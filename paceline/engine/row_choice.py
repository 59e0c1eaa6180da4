"""Choices of many rows at once by a device's kernels: the rows' rules as tensors, and what the kernels must do.

It knows which rules kernels can follow, and not how; `sampling` has the rule itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple, Protocol

import torch

from paceline.engine.noise import signed64
from paceline.engine.transfer import to_device
from paceline.types import ChoiceRule, SamplingParameters

NO_TOKEN = -1
"""Stands for the token id, on the device, where no token can be chosen."""


def is_by_logits(rule: ChoiceRule) -> bool:
    """Return whether a choice depends on logits and position alone: no bias, no penalty, no early end, no format."""
    sampling = rule.sampling
    filters = SamplingParameters(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return sampling == filters and rule.response_format is None


def is_plain(rule: ChoiceRule) -> bool:
    """Return whether nothing but the temperature changes the logits."""
    return rule.sampling == SamplingParameters(rule.sampling.temperature) and rule.response_format is None


def up_to_none(choices: Sequence[int]) -> list[int]:
    """Return the choices before the first that could not be made."""
    return [*choices[: choices.index(NO_TOKEN)]] if NO_TOKEN in choices else [*choices]


@dataclass(frozen=True)
class RowRules:
    """Rules of N rows, of which `is_by_logits` holds, on the device."""

    seeds: torch.Tensor
    """[N], made by `signed64`."""
    numbers: torch.Tensor
    """[N, 4] in float64: temperature, top-k, top-p, and the logarithm of min-p."""

    @staticmethod
    def empty(row_count: int, device: torch.device) -> "RowRules":
        """Return greedy rules, to be filled in."""
        seeds = torch.zeros(row_count, dtype=torch.int64, device=device)
        return RowRules(seeds, torch.zeros((row_count, 4), dtype=torch.float64, device=device))

    def fill(self, rules: Sequence[ChoiceRule]) -> None:
        """Write the rules of the first rows; the others become greedy."""
        device = self.seeds.device
        self.seeds[: len(rules)] = to_device([signed64(rule.seed) for rule in rules], device)
        numbers = [_numbers(rule.sampling) for rule in rules]
        self.numbers[: len(rules)] = to_device(numbers, device, torch.float64)
        self.numbers[len(rules) :] = 0


def _numbers(sampling: SamplingParameters) -> tuple[float, ...]:
    least = log(sampling.min_p) if sampling.min_p else float("-inf")
    return sampling.temperature, sampling.top_k, sampling.top_p, least


class Chooser(Protocol):
    """Chooses tokens for many rows at once, by the rule of `sampling`."""

    def knows(self, rule: ChoiceRule) -> bool:
        """Return whether it can choose by this rule, of which all but temperature and filters was applied before."""
        ...

    def choose(
        self, logits: Sequence[torch.Tensor], rules: Sequence[ChoiceRule], positions: Sequence[int]
    ) -> list[int]:
        """Return a choice for each row of some logits [T, V], N rows in all; `NO_TOKEN` where there is none.

        `rules` [N] are those of the rows, and `positions` [N] those of the chosen tokens.
        """
        ...


class RankedToken(NamedTuple):
    token_id: int
    probability: float
    """Of being the choice of a model like this one, which draws the same noise: an estimate from the scores."""


class Ranker(Protocol):
    """Finds what may be chosen after many rows, by rules of which `is_plain` holds."""

    def rank(
        self, logits: Sequence[torch.Tensor], rules: Sequence[ChoiceRule], positions: Sequence[int], count: int
    ) -> list[list[RankedToken]]:
        """Return for each row the tokens of `sampling.ranked`; the rest is as with a `Chooser`."""
        ...


class ChoiceKernels(Protocol):
    def choose_rows(self, logits: torch.Tensor, rules: RowRules, positions: torch.Tensor) -> torch.Tensor:
        """Return the choices [N] from logits [N, V] by the rule of `sampling`; `NO_TOKEN` where there is none.

        All choices of one rule are made by one of the two: where a filter ends, their sums may round otherwise.
        `positions` [N] are those of the chosen tokens.
        """
        ...


class DeviceChooser:
    """Chooses by a device's kernels. The host waits for them once, for many rows as for one."""

    def __init__(self, kernels: ChoiceKernels) -> None:
        self._kernels = kernels

    def knows(self, rule: ChoiceRule) -> bool:
        return True

    def choose(
        self, logits: Sequence[torch.Tensor], rules: Sequence[ChoiceRule], positions: Sequence[int]
    ) -> list[int]:
        rows = torch.cat([*logits])
        rules_there = RowRules.empty(len(rules), rows.device)
        rules_there.fill(rules)
        chosen: list[int] = self._kernels.choose_rows(rows, rules_there, to_device(positions, rows.device)).tolist()
        return chosen
