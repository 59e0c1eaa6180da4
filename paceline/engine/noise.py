"""Noise that draft and target draw alike without communicating: a Gumbel variable for each (seed, position, token id).

The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) read at any place: the stream of an absolute position
starts at `mix(mix(seed) + position * GOLDEN)`, and the token id is the counter. Integer arithmetic makes every device
draw the same bits; only the two logarithms are floating point, in float64. Nothing depends on the vocabulary's size,
the batch or the order of calls.
"""

from collections.abc import Sequence

import torch

GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def gumbel(seed: int, positions: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float64 [T, N], for tokens [N] or [T, N] at T absolute positions."""
    places = torch.tensor(positions, dtype=torch.int64, device=token_ids.device)
    return gumbel_at(stream_starts(torch.full_like(places, signed64(seed)), places), token_ids)


def stream_starts(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the starts of the streams of T seeds at T positions, int64 [T]; `seeds` are made by `signed64`."""
    return mix64(mix64(seeds) + positions * signed64(GOLDEN))


def gumbel_at(starts: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float64 [T, N], of T streams for tokens [N] or [T, N]."""
    bits = mix64(starts[:, None] + token_ids * signed64(GOLDEN))
    # The noise is finite for every seed, position and token. With m the upper 52 bits, m + 1/2 = (2m + 1) / 2 and
    # 2m + 1 < 2^53, so float64 holds the sum without rounding; a power of two scales it without rounding too. Hence
    # 2^-53 <= u <= 1 - 2^-53. There -ln u lies between 2^-53 and 36.8, far from 0 and from infinity for a logarithm
    # that is right to a few units in the last place, and so the noise lies between -3.7 and 36.8. One bit more would
    # round m + 1/2 up to 2^53: u = 1, and the noise infinite.
    uniform = (_shifted(bits, 12).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()


def mix64(value: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finaliser to 64-bit numbers."""
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
        value = (value ^ _shifted(value, shift)) * signed64(multiplier)
    return value ^ _shifted(value, _SHIFTS[2])


def _shifted(value: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right and fill with zeros, where int64 would copy the sign."""
    return (value >> count) & ((1 << (64 - count)) - 1)


def signed64(value: int) -> int:
    """Return the number that has the same 64 bits in torch's int64."""
    return value - (1 << 64) if value >> 63 else value
