"""Hugging Face's ways to decode, as peers that answer prompts and can be told to stop."""

from collections.abc import Mapping, Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from paceline.measure.peers.reference import HuggingFaceReference

LOOKUP_TOKENS = 10
"""Most tokens that prompt lookup copies; the value its author proposed."""


class HuggingFacePeer:
    """Greedy `generate`, in batches in the order of the prompts."""

    def __init__(
        self,
        reference: HuggingFaceReference,
        max_new_tokens: int,
        batch_size: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`options`, such as an assistant, go to `generate`."""
        self._reference = reference
        self._max_new_tokens = max_new_tokens
        self._batch_size = batch_size
        self._options = dict(options or {})
        self.threads = torch.get_num_threads()

    def answer(self, prompts: Sequence[Sequence[int]], stop: Event) -> list[list[int]]:
        """Return each prompt's new tokens up to its end token, or those made until `stop` is set."""
        # OpenMP's count belongs to the calling thread, which peers of one bench share.
        torch.set_num_threads(self.threads)
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), self._batch_size):
            outputs += self._reference.generate_batch(
                prompts[start : start + self._batch_size],
                self._max_new_tokens,
                stopping_criteria=[_Stop(stop)],
                **self._options,
            )
        return outputs


def assistance(draft: HuggingFaceReference, draft_count: int | None = None) -> dict[str, Any]:
    """Return options for assisted generation, with `draft_count` drafts a round; None leaves transformers' defaults."""
    if draft_count is not None:
        draft.model.generation_config.update(
            num_assistant_tokens=draft_count,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
    return {"assistant_model": draft.model}


def prompt_lookup() -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}


class _Stop(StoppingCriteria):
    """Ends all rows when the event is set, so that an interrupted measurement does not wait for its batch."""

    def __init__(self, stop: Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self._stop.is_set(), dtype=torch.bool, device=input_ids.device)
