"""Heads for a synthetic target (`paceline synth-pair`), which know its cycle of tokens as the synthetic draft does.

They do all of the arithmetic of trained ones, so they are good for measuring speed alone.
"""

import torch
from torch import nn

from paceline.engine.heads.interface import HeadsModule
from paceline.measure.synthetic.calibration import DRAFT_FACTOR
from paceline.measure.synthetic.weights import scale_additions
from training.features import FrozenTarget
from training.heads import begun_heads


def synthetic_heads(target: FrozenTarget, draft_count: int) -> HeadsModule:
    """Return EAGLE's heads that hand on a token's embedding: the target's head knows the successor from it."""
    heads = begun_heads("eagle", target, draft_count)
    linear = heads.fc
    assert isinstance(linear, nn.Linear)
    with torch.no_grad():
        nn.init.eye_(linear.weight)  # embeddings stand before features
        nn.init.zeros_(linear.bias)
    scale_additions(heads, DRAFT_FACTOR)
    return heads
