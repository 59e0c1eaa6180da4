"""Mixtures of experts: whether a model is one, and how passes are compared of which near ties decide.

Where a router finds two experts nearly equal, the last bits decide between them, and results differ as much as the two
do. In half precision that is more than a wrong attention may make.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

_calls = threading.local()


def mixes_experts(module: PreTrainedModel) -> bool:
    """Look for experts among the modules: configurations name them in a dozen ways, and some without having any."""
    return any(type(one).__name__.endswith(("Experts", "MoE")) for one in module.modules())


class _SameExperts(TorchFunctionMode):
    """Names the first experts in place of those that `topk` found. A router that goes without it chooses freely."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        found = function(*args, **named)
        if function not in (torch.topk, torch.Tensor.topk):
            return found
        best, indices = found
        axis = named.get("dim", args[2] if len(args) > 2 else -1)
        if axis % best.ndim != best.ndim - 1:  # what is chosen is no expert of a token
            return found
        first = torch.arange(indices.shape[-1], device=indices.device)
        return torch.return_types.topk((best, first.expand_as(indices).contiguous()))


@contextmanager
def same_experts() -> Iterator[None]:
    """Have all tokens go to the same experts, the first of each layer, weighted by the token's own best scores.

    Unlike a choice, these scores change no more than what they are computed from does.
    """
    _calls.are_same = True
    try:
        with _SameExperts():
            yield
    finally:
        _calls.are_same = False


def experts_are_same() -> bool:
    """Return whether this thread is inside `same_experts`."""
    are: bool = getattr(_calls, "are_same", False)
    return are
