"""The rule of choice for many rows at once, without leaving the device. See `engine.sampling` for the rule itself."""

import torch

from paceline.engine.noise import gumbel_at, stream_starts
from paceline.types import SamplingParameters

NO_TOKEN = -1
"""Stands on the device for the token where there is none to choose."""


def is_plain(sampling: SamplingParameters) -> bool:
    """True when a choice depends on temperature and seed alone: no filter, no penalty, no bias."""
    return sampling == SamplingParameters(temperature=sampling.temperature)


def choose_rows(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Choices [N], as `coded` gives them, from logits [N, V]; where the temperature [N] is 0, the likeliest token.

    `positions` [N] are those of the tokens chosen.
    """
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    heated = logits.float() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    sampled = (heated.double() + gumbel_at(stream_starts(seeds, positions), token_ids)).max(dim=-1)
    greedy = logits.max(dim=-1)
    return torch.where(temperatures > 0, coded(sampled.values, sampled.indices), coded(greedy.values, greedy.indices))


def coded(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The token ids [N] of the highest scores [N], but `NO_TOKEN` where such a score allows no choice."""
    return torch.where(scores.isfinite(), token_ids, NO_TOKEN)
