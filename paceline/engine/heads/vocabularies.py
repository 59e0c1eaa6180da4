"""The logits of heads whose own head knows some of the target's tokens only."""

from collections.abc import Callable

from torch import Tensor


class PartialHead:
    """A product whose logits are of tokens `token_ids` [N]: no other token of the vocabulary is ever drafted."""

    def __init__(self, product: Callable[[Tensor], Tensor], token_ids: Tensor, vocabulary_size: int) -> None:
        self._product = product
        self._token_ids = token_ids
        self._vocabulary_size = vocabulary_size

    def __call__(self, values: Tensor) -> Tensor:
        """Turn [M, K] into [M, V]."""
        logits = self._product(values)
        return logits.new_full((len(logits), self._vocabulary_size), -float("inf")).index_copy_(
            1, self._token_ids, logits
        )
