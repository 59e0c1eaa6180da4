"""Features of outputs: what goes into a target's last norm at each of their tokens, computed once for all heads.

It owns their file, and batches of them. It knows nothing of heads.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.engine.model.identity import origin_of_module
from paceline.engine.model.loader import resolve_device
from paceline.errors import InvalidRequest
from training.loop import bucketed, read_model
from training.outputs import Output, read_outputs

NAME, TOKENS, TARGET = "features", "token_ids", "target"
"""What a file of features has: these, the tokens that they are of, and a digest of the target's weights."""
READ_TOKENS = 32_768
"""Most tokens that the target reads at once, padding included."""
LEAST_TOKENS = 3
"""Of an output that heads can learn from: a feature, the token that they read beside it, and the one they draft."""


@dataclass(frozen=True)
class Text:
    """Where an output stands among the tokens of all."""

    begin: int
    length: int
    """Tokens of the prompt and of the output."""
    prompt_count: int

    def __len__(self) -> int:
        return self.length


@dataclass(frozen=True)
class Batch:
    """Texts side by side; behind the end of each one stands what nobody may use."""

    token_ids: Tensor
    """[B, T]"""
    features: Tensor
    """[B, T, H] in bfloat16"""
    texts: Sequence[Text]


@dataclass(frozen=True)
class Texts:
    """Outputs and their features on the target's device: N tokens of all of them, laid end to end."""

    token_ids: Tensor
    """[N]"""
    features: Tensor
    """[N, H] in bfloat16"""
    rows: Sequence[Text]

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, row: Text) -> tuple[int, ...]:
        return tuple(self.token_ids[row.begin : row.begin + row.prompt_count].tolist())

    def part(self, rows: Sequence[Text]) -> Self:
        """Return some of the texts."""
        return replace(self, rows=rows)

    def batch(self, rows: Sequence[Text]) -> Batch:
        places = torch.tensor([row.begin for row in rows])[:, None] + torch.arange(max(map(len, rows)))
        found = places.clamp_max(len(self.token_ids) - 1).to(self.token_ids.device)
        return Batch(self.token_ids[found], self.features[found], rows)

    def one_by_one(self) -> Iterator[Batch]:
        return (self.batch([row]) for row in self.rows)

    def once(self, token_budget: int) -> Iterator[Batch]:
        """Yield each text once, those of similar length together."""
        return map(self.batch, bucketed(self.rows, token_budget, random.Random(0)))

    def batches(self, token_budget: int, rng: random.Random) -> Iterator[Batch]:
        """Yield batches without end, all texts once before any comes again."""
        while True:
            yield from map(self.batch, bucketed(self.rows, token_budget, rng))


class FrozenTarget:
    """The parts of a target that heads share: embeddings, last norm and head."""

    def __init__(self, module: Any) -> None:
        self.module = module.eval().requires_grad_(False)
        self.config = module.config
        self.device: torch.device = module.device

    @classmethod
    def read(cls, folder: Path, device: str = "cpu") -> Self:
        """Read a checkpoint, in float32. Raise InvalidRequest for another folder, StartupError for no such device."""
        return cls(read_model(folder, AutoModelForCausalLM).to(resolve_device(device)))

    @cached_property
    def digest(self) -> str:
        """Of the weights, which features depend on."""
        return origin_of_module(self.module).weights_digest

    def embedded(self, token_ids: Tensor) -> Tensor:
        found: Tensor = self.module.get_input_embeddings()(token_ids)
        return found

    def normed(self, features: Tensor) -> Tensor:
        found: Tensor = self.module.model.norm(features)
        return found

    def logits(self, output: Tensor) -> Tensor:
        found: Tensor = self.module.lm_head(output)
        return found

    def read_texts(self, outputs: Sequence[Output], features: Tensor | None = None) -> Texts:
        """Return outputs with their features [N, H], which the target computes unless they are given."""
        lengths = torch.tensor([len(one) for one in outputs])
        begins = (lengths.cumsum(0) - lengths).tolist()
        rows = [Text(begin, len(one), one.prompt_count) for begin, one in zip(begins, outputs, strict=True)]
        tokens = torch.tensor([token_id for one in outputs for token_id in one.token_ids], device=self.device)
        if features is None:
            features = torch.empty(len(tokens), self.config.hidden_size, dtype=torch.bfloat16, device=self.device)
            self._compute(Texts(tokens, features, rows))
        return Texts(tokens, features.to(self.device), rows)

    @torch.no_grad()
    def _compute(self, texts: Texts) -> None:
        """Fill in the features."""
        found, kind = list[Tensor](), self.device.type
        hook = self.module.model.norm.register_forward_hook(lambda module, inputs, output: found.append(inputs[0]))
        try:
            for rows in bucketed(texts.rows, READ_TOKENS, random.Random(0)):
                with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                    self.module.model(input_ids=texts.batch(rows).token_ids, use_cache=False)
                # A later token changes nothing before it, so what stands behind a text's end does no harm.
                for row, features in zip(rows, found.pop(), strict=True):
                    texts.features[row.begin : row.begin + len(row)] = features[: len(row)]
        finally:
            hook.remove()


def texts_of(target: FrozenTarget, outputs: Path, file: Path | None, most: int | None = None) -> Texts:
    """Return the outputs in a file, `most` of them, with features from `file`, which is written when it is missing.

    Raise InvalidRequest when the file has features of something else, and when there are no outputs of this target.
    """
    own = _outputs(outputs, target.config.vocab_size, most)
    if file and file.exists():
        return target.read_texts(own, _kept(file, outputs, own, target))
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)  # before the target reads for minutes
    made = target.read_texts(own)
    if file:
        save_file({NAME: made.features, TOKENS: made.token_ids}, file, {TARGET: target.digest})
    return made


def _outputs(file: Path, vocabulary_size: int, most: int | None) -> list[Output]:
    """Return those that heads can learn from."""
    own = [one for one in read_outputs(file, vocabulary_size)[:most] if len(one) >= LEAST_TOKENS]
    if not own:
        raise InvalidRequest(f"{file} has no outputs of {LEAST_TOKENS} tokens, prompts included; give longer ones")
    return own


def _kept(file: Path, outputs: Path, own: Sequence[Output], target: FrozenTarget) -> Tensor:
    """Return the features of these outputs, with which those in the file begin."""
    try:
        kept = load_file(file)
        features, tokens = kept[NAME], kept[TOKENS]
        with safe_open(file, "pt") as content:
            made_by = content.metadata()[TARGET]
    except (OSError, KeyError, TypeError, SafetensorError) as error:
        raise InvalidRequest(
            f"--features {file} has no features ({error}); delete it, to have it made again", field="features"
        ) from error
    wanted = torch.tensor([token_id for one in own for token_id in one.token_ids])
    if made_by != target.digest or not torch.equal(tokens[: len(wanted)], wanted):
        raise InvalidRequest(
            f"--features {file} has features of other tokens than those of {outputs}, or of another target; delete it, "
            "to have it made again",
            field="features",
        )
    return features[: len(wanted)]
