"""Training of the target on GSM8K's worked answers, half of the problems with fresh numbers each epoch."""

import random
from collections.abc import Iterator, Sequence
from itertools import count

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from training.loop import IGNORED, Shape, bucketed
from training.outputs import padded
from training.problems import Problem, prompt_text, vary
from training.tokenizer import END

TARGET_SHAPE = Shape(hidden_size=288, layer_count=8, head_count=6, kv_head_count=3, mlp_size=768)
VARIED_SHARE = 0.5


def example_text(problem: Problem) -> str:
    return prompt_text(problem.question) + problem.answer + END


def batches(problems: Sequence[Problem], tokenizer: Tokenizer, token_budget: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield padded batches [B, T] of whole problems, epoch after epoch; `IGNORED` marks padding."""
    rng = random.Random(seed)
    for _ in count():
        texts = [example_text(vary(p, rng) if rng.random() < VARIED_SHARE else p) for p in problems]
        rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        for batch in bucketed(rows, token_budget, rng):
            yield padded(batch)


def next_token_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the cross-entropy over questions and answers, and its token count. Reading well is half of answering."""
    batch = batch.to(model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        # Padding lies right of every real token, so plain causal attention never sees it.
        logits = model(input_ids=batch.clamp_min(0), use_cache=False).logits
    labels = batch[:, 1:].reshape(-1)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, ignore_index=IGNORED)
    return loss, int((labels != IGNORED).sum())
