"""Hugging Face `generate`: the yardstick for exactness and for speed.

It loads the checkpoint a second time, with transformers' own attention. The engine only tells where the
checkpoint is and which tokens end outputs, and quantises.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from paceline.engine.model.checkpoint import find_checkpoint
from paceline.engine.model.loader import end_token_ids_of, keep_float32
from paceline.engine.model.quantized_layers import quantize_layers
from paceline.types import Quantization


class HuggingFaceReference:
    def __init__(self, model: str, dtype: str, device: str = "cpu", quantization: str = "none") -> None:
        """`dtype` is a torch type's name, such as `float32`, or `auto` for the checkpoint's own.

        With `quantization` it has the weights that the engine would have, and rounds rows where that does.
        """
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        keep_float32()
        folder = find_checkpoint(model).folder
        self._folder = folder
        # Assisted generation warns about calls that transformers itself makes.
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype if dtype == "auto" else getattr(torch, dtype), local_files_only=True
        )
        self._end_token_ids = end_token_ids_of(loaded)
        # A checkpoint's penalties would change greedy outputs too; requests here have none unless they say so.
        ends = [*self._end_token_ids] or None
        loaded.generation_config = GenerationConfig(eos_token_id=ends)  # type: ignore[no-untyped-call]
        self.model = loaded.to(device)
        if quantization != "none":
            quantize_layers(self.model, cast(Quantization, quantization))

    @cached_property
    def _tokenizer(self) -> Any:
        # Read on first use, because a checkpoint without a tokenizer can still take token ids.
        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)

    def encode(self, text: str, *, chat: bool) -> list[int]:
        """Tokenize a prompt as a user of transformers would, in the chat template or raw."""
        if chat:
            messages = [{"role": "user", "content": text}]
            encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        else:
            encoded = self._tokenizer(text)
        token_ids: list[int] = encoded["input_ids"]
        return token_ids

    def generate(self, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Return the new tokens of greedy decoding at batch 1, the end token included."""
        return self.generate_batch([token_ids], max_new_tokens)[0]

    def generate_batch(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> list[list[int]]:
        """Return each prompt's new tokens up to its end token, decoded greedily as one left-padded batch.

        `options` go to transformers' `generate`.
        """
        width = max(map(len, prompts))
        pad_id = next(iter(self._end_token_ids), 0)
        padded = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output = self.model.generate(
            torch.tensor(padded, device=self.model.device),
            attention_mask=torch.tensor(mask, device=self.model.device),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_id,
            **options,
        )
        return [self._until_end(row) for row in output[:, width:].tolist()]

    @torch.inference_mode()
    def logit_gap(self, token_ids: Sequence[int], likelier: int, other: int) -> float:
        """Return by how much the logit of `likelier` exceeds that of `other` after `token_ids`."""
        logits = self.model(torch.tensor([list(token_ids)], device=self.model.device)).logits[0, -1].float()
        return float(logits[likelier] - logits[other])

    def _until_end(self, token_ids: list[int]) -> list[int]:
        # A batch pads a row after its end until the longest row has ended; the padding is not output.
        kept = list(takewhile(lambda one: one not in self._end_token_ids, token_ids))
        return token_ids[: len(kept) + 1]
