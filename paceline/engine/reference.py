"""What Hugging Face `generate` makes of a prompt: the yardstick for exactness, in the demo and in the tests.

Loads the checkpoint a second time, with transformers' own attention; shares nothing with the engine.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from paceline.builtin import resolve_model


class HuggingFaceReference:
    def __init__(self, model: str, dtype: str) -> None:
        """`dtype` is a torch type's name, such as `float32`."""
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        folder = resolve_model(model)
        self._folder = folder
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )

    @cached_property
    def _tokenizer(self) -> Any:
        # Read on first use: a checkpoint without tokenizer can still be asked in token ids.
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
        prompt = torch.tensor([list(token_ids)])
        output = self._model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens
        )
        new: list[int] = output[0, prompt.shape[1] :].tolist()
        return new
