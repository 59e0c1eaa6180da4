"""Lessons for drafts: the target's distribution at each position of its outputs, and the file that keeps them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from paceline.errors import InvalidRequest
from training.loop import mixed_precision
from training.outputs import Output, output_places, padded

TEACHER_CHOICES = 16
"""Number of likeliest tokens kept of the teacher's distribution; the others hold under 2 % of it."""


@dataclass(frozen=True)
class Lesson:
    output: Output
    choices: torch.Tensor
    """Token ids [output tokens, TEACHER_CHOICES]."""
    weights: torch.Tensor
    """Probabilities [output tokens, TEACHER_CHOICES] that the draft should give them, summing to 1."""

    def __len__(self) -> int:
        return len(self.output)


def output_logits(model: LlamaForCausalLM, outputs: Sequence[Output]) -> tuple[torch.Tensor, int]:
    """Return a model's logits at all output positions, and how many tokens it read."""
    tokens = padded([one.token_ids for one in outputs]).clamp_min(0)
    with mixed_precision(model.device):
        hidden = model.model(input_ids=tokens.to(model.device), use_cache=False).last_hidden_state
        places = output_places(outputs).to(model.device)
        return model.lm_head(hidden.flatten(0, 1).index_select(0, places)), tokens.numel()


@torch.no_grad()
def lessons(
    teacher: LlamaForCausalLM, batches: Iterable[list[Output]], report: Callable[[str], None]
) -> Iterator[Lesson]:
    """Run the teacher over whole outputs and learn from its likeliest choices at each output position."""
    for number, batch in enumerate(batches):
        logits, _ = output_logits(teacher, batch)
        top = logits.float().softmax(-1).topk(TEACHER_CHOICES)
        weights = top.values / top.values.sum(-1, keepdim=True) / 2
        # Half of the weight is on the teacher's greedy choice (as far as bfloat16 tells) and half is its
        # distribution, whose other choices keep the draft from learning outputs by heart.
        weights[:, 0] += 0.5
        yield from _parted(batch, top.indices.to(torch.int16).cpu(), weights.half().cpu())
        if number % 100 == 0:
            report(f"lessons from {number} batches")


def _parted(outputs: Sequence[Output], choices: torch.Tensor, weights: torch.Tensor) -> Iterator[Lesson]:
    """Give each output its own rows of all outputs' choices and weights."""
    counts = [len(one) - one.prompt_count for one in outputs]
    yield from map(Lesson, outputs, torch.split(choices, counts), torch.split(weights, counts))


def write_lessons(path: Path, made: Sequence[Lesson]) -> None:
    """Keep lessons in a file, so that several drafts can learn from what the teacher read once."""
    outputs = [one.output for one in made]
    columns = {
        "token_ids": torch.tensor([token_id for one in outputs for token_id in one.token_ids], dtype=torch.int32),
        "lengths": torch.tensor([len(one) for one in outputs]),
        "prompt_counts": torch.tensor([one.prompt_count for one in outputs]),
        "choices": torch.cat([one.choices for one in made]),
        "weights": torch.cat([one.weights for one in made]),
    }
    save_file(columns, path)


def read_lessons(path: Path) -> list[Lesson]:
    """Read what `write_lessons` wrote. Raise InvalidRequest when it is something else."""
    try:
        kept = load_file(path)
        rows = torch.split(kept["token_ids"], kept["lengths"].tolist())
        outputs = [
            Output(tuple(row.tolist()), count) for row, count in zip(rows, kept["prompt_counts"].tolist(), strict=True)
        ]
        return list(_parted(outputs, kept["choices"], kept["weights"]))
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidRequest(
            f"--lessons {path} has no lessons ({error!r}); delete it, to have it made again", field="lessons"
        ) from error
