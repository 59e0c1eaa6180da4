"""The rule of choice for many rows at once, on the device. See `engine.sampling` for the rule itself."""

import torch

from paceline.engine.noise import gumbel_at, stream_starts
from paceline.types import SamplingParameters

NO_TOKEN = -1
"""Stands for the token id, on the device, where no token can be chosen."""


def is_plain(sampling: SamplingParameters) -> bool:
    """Return whether a choice depends on temperature and seed alone: no filter, no penalty, no bias."""
    return sampling == SamplingParameters(temperature=sampling.temperature)


def choose_rows(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return the choices [N] from logits [N, V], in the form of `coded`; greedy where the temperature [N] is 0.

    `positions` [N] are the positions of the chosen tokens.
    """
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    heated = logits.float() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    sampled = (heated.double() + gumbel_at(stream_starts(seeds, positions), token_ids)).max(dim=-1)
    greedy = logits.max(dim=-1)
    return torch.where(temperatures > 0, coded(sampled.values, sampled.indices), coded(greedy.values, greedy.indices))


def coded(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the token ids [N] of the highest scores [N], but `NO_TOKEN` where a score is not finite."""
    return torch.where(scores.isfinite(), token_ids, NO_TOKEN)
