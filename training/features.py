"""Features of outputs: what goes into a target's last norm at each of their tokens, computed once for all heads.

It owns their file. It knows nothing of heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.errors import InvalidRequest
from training.outputs import read_outputs

NAME = "features"


@dataclass(frozen=True)
class Features:
    """A text and its features."""

    token_ids: Tensor
    """[T]"""
    features: Tensor
    """[T - 1, H] in bfloat16; nothing follows the last token"""
    prompt_count: int


class FrozenTarget:
    """The parts of a target that heads share: embeddings, last norm and head."""

    def __init__(self, module: Any) -> None:
        self.module = module.eval().requires_grad_(False)
        self.config = module.config

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a checkpoint, in float32."""
        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))

    def embedded(self, token_ids: Tensor) -> Tensor:
        found: Tensor = self.module.get_input_embeddings()(token_ids)
        return found

    def normed(self, features: Tensor) -> Tensor:
        found: Tensor = self.module.model.norm(features)
        return found

    def logits(self, output: Tensor) -> Tensor:
        found: Tensor = self.module.lm_head(output)
        return found

    @torch.no_grad()
    def features(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[Features]:
        """Return the features of texts, each with its number of prompt tokens."""
        found: list[Tensor] = []
        hook = self.module.model.norm.register_forward_hook(lambda module, inputs, output: found.append(inputs[0][0]))
        try:
            for token_ids, _ in texts:
                self.module.model(input_ids=torch.tensor([token_ids[:-1]]))
        finally:
            hook.remove()
        return [
            Features(torch.tensor(token_ids), features.bfloat16(), prompt_count)
            for (token_ids, prompt_count), features in zip(texts, found, strict=True)
        ]


def features_of(target: FrozenTarget, outputs: Path, file: Path | None, most: int | None = None) -> list[Features]:
    """Return the features of the outputs in a file, `most` of them; from `file`, which is written when it is missing.

    Raise InvalidRequest when the file has features of something else, and when there are no outputs.
    """
    texts = [(one.token_ids, one.prompt_count) for one in read_outputs(outputs)[:most]]
    if file is None or not file.exists():
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)  # before the target reads for minutes
        made = target.features(texts)
        if file is not None:
            save_file({NAME: torch.cat([one.features for one in made])}, file)
        return made
    counts = [len(token_ids) - 1 for token_ids, _ in texts]
    kept, wanted = _kept(file), (sum(counts), target.config.hidden_size)
    if kept.ndim != 2 or len(kept) < wanted[0] or kept.shape[1] != wanted[1]:
        raise InvalidRequest(
            f"--features {file} has features of the form {tuple(kept.shape)}, and {outputs} with this target {wanted}; "
            "delete it, to have it made again",
            field="features",
        )
    parts = torch.split(kept[: sum(counts)], counts)
    return [
        Features(torch.tensor(token_ids), part, prompt_count)
        for (token_ids, prompt_count), part in zip(texts, parts, strict=True)
    ]


def _kept(file: Path) -> Tensor:
    try:
        return load_file(file)[NAME]
    except (OSError, KeyError, SafetensorError) as error:
        raise InvalidRequest(
            f"--features {file} has no features ({error}); delete it, to have it made again", field="features"
        ) from error
