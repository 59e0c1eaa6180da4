"""The rule that turns logits into choices. Draft and target use the same one.

Greedy: the most likely token, the lowest id among equals.
"""

from collections.abc import Sequence

import torch


def choose(logits: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return one token id for each row of each sequence's logits [T, V]; one read from the device for all of them."""
    if not logits:
        return []
    choices = torch.cat([one.argmax(dim=-1) for one in logits]).tolist()
    ends = [0]
    for one in logits:
        ends.append(ends[-1] + one.shape[0])
    return [choices[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]
