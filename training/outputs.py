"""The target's own greedy outputs, and what it thought at each of their positions: what the draft learns from.

Uses the product's engine, so these are the outputs the pair will be asked for.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from transformers import LlamaForCausalLM

from paceline.engine.loader import load_model
from paceline.engine.options import EngineOptions
from paceline.engine.runner import Runner
from paceline.types import Prefilled, Verdict, VerifyRow
from target_service.verifier import Verifier
from training.loop import IGNORED

TEACHER_CHOICES = 16
"""Most likely tokens kept of the teacher's distribution; the rest holds under 2 % of it."""


@dataclass(frozen=True)
class Output:
    token_ids: tuple[int, ...]
    """Prompt, then output."""
    prompt_count: int

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Lesson:
    output: Output
    choices: torch.Tensor
    """[output tokens, TEACHER_CHOICES] token ids."""
    weights: torch.Tensor
    """[output tokens, TEACHER_CHOICES] probabilities, renormalised."""

    def __len__(self) -> int:
        return len(self.output)


def greedy_outputs(
    model: str, prompts: Iterable[Sequence[int]], *, minutes: float, max_new_tokens: int = 320, batch_size: int = 64
) -> Iterator[Output]:
    """Decode prompts with the target until they or the minutes run out; a finished one's place is taken by the next."""
    options = EngineOptions(kv_memory="4GiB", prefill_chunk_tokens=4096)
    verifier = Verifier(Runner(load_model(model, "float32"), options))
    ends = set(verifier.runner.model.description.end_token_ids)
    ends_at = time.monotonic() + 60 * minutes
    source = enumerate(prompts)
    live: dict[str, tuple[list[int], int]] = {}
    while time.monotonic() < ends_at:
        live |= {str(n): (list(ids), len(ids)) for n, ids in islice(source, batch_size - len(live))}
        if not live:
            return
        rows = []
        for sequence_id, (token_ids, prompt_count) in live.items():
            base_length = len(token_ids) - 1 if len(token_ids) > prompt_count else 0
            rows.append(VerifyRow(sequence_id, base_length, tuple(token_ids[base_length:]), ()))
        for row, verdict in zip(rows, verifier.verify(rows), strict=True):
            if isinstance(verdict, Prefilled):
                continue
            assert isinstance(verdict, Verdict)
            token_ids, prompt_count = live[row.sequence_id]
            token_ids.append(verdict.next_token_id)
            if verdict.next_token_id in ends or len(token_ids) - prompt_count == max_new_tokens:
                del live[row.sequence_id]
                verifier.runner.release([row.sequence_id])
                yield Output(tuple(token_ids), prompt_count)


def own_lesson(output: Output) -> Lesson:
    """The target's greedy output is its own best lesson: all weight on the token it chose, and no pass is needed."""
    chosen = torch.tensor(output.token_ids[output.prompt_count :], dtype=torch.int16)
    choices = chosen[:, None].expand(-1, TEACHER_CHOICES)
    weights = torch.zeros(choices.shape, dtype=torch.float16)
    weights[:, 0] = 1
    return Lesson(output, choices, weights)


@torch.no_grad()
def lessons(
    teacher: LlamaForCausalLM, batches: Iterable[list[Output]], report: Callable[[str], None]
) -> Iterator[Lesson]:
    """Run the teacher over whole outputs and keep its likeliest choices at each output position."""
    for number, batch in enumerate(batches):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = teacher(input_ids=padded([one.token_ids for one in batch]).clamp_min(0)).logits
        for output, row in zip(batch, logits, strict=True):
            top = row[output.prompt_count - 1 : len(output) - 1].float().softmax(-1).topk(TEACHER_CHOICES)
            weights = top.values / top.values.sum(-1, keepdim=True)
            yield Lesson(output, top.indices.to(torch.int16), weights.half())
        if number % 100 == 0:
            report(f"lessons from {number} batches")


def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Lay rows side by side as [B, T]; `IGNORED` marks padding, on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[IGNORED] * (width - len(row))] for row in rows])
