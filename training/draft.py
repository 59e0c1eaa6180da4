"""Distillation of the draft from the target's choice and its likeliest tokens at every output position.

It is word-level, on the teacher's own outputs (Kim and Rush, arXiv 1606.07947), because greedy speculation asks the
draft for the target's argmax on just such text.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import count

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from training.lessons import Lesson, output_logits
from training.loop import Shape, bucketed
from training.outputs import Output
from training.problems import Problem, prompt_text
from training.target import example_text

DRAFT_SHAPE = Shape(hidden_size=128, layer_count=2, head_count=4, kv_head_count=2, mlp_size=384)


def as_output(problem: Problem, tokenizer: Tokenizer) -> Output:
    """Return a worked answer in the form of an output, from which the teacher can make a lesson."""
    prompt_count = len(tokenizer.encode(prompt_text(problem.question)).ids)
    return Output(tuple(tokenizer.encode(example_text(problem)).ids), prompt_count)


def batches(lessons: Sequence[Lesson], token_budget: int, seed: int) -> Iterator[list[Lesson]]:
    rng = random.Random(seed)
    for _ in count():
        yield from bucketed(lessons, token_budget, rng)


def distillation_loss(model: LlamaForCausalLM, batch: list[Lesson]) -> tuple[torch.Tensor, int]:
    """Return the cross-entropy against the lessons' weights, over output positions only, and the token count."""
    device = model.device
    logits, token_count = output_logits(model, [lesson.output for lesson in batch])
    choices = torch.cat([lesson.choices for lesson in batch]).to(device).long()
    weights = torch.cat([lesson.weights for lesson in batch]).to(device).float()
    likelihoods = logits.float().log_softmax(-1).gather(1, choices)
    return -(weights * likelihoods).sum(-1).mean(), token_count
