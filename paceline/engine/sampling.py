"""The rule that turns logits into choices. Draft and target use the same one.

At every position a model has one choice: a function of its logits there, the request's parameters, its seed and the
absolute position. Without temperature it is the most likely token, the lowest id among equals; with it the
Gumbel-maximum `argmax(log p + G)`, whose `G` both models draw alike (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.noise import gumbel
from paceline.types import GREEDY, ChoiceRule, SamplingParameters, TokenLogprobs

SPARSE_SHARE = 4
"""When filters leave fewer than one token in this many, noise is drawn for those alone."""


@dataclass(frozen=True)
class Choosing:
    """What the choices of one sequence follow from."""

    logits: torch.Tensor
    """[T, V]: after the prefix, and after each of the T - 1 tokens that follow it."""
    rule: ChoiceRule
    prefix: Sequence[int]
    following: Sequence[int] = ()


def choose(sequences: Sequence[Choosing]) -> list[list[int]]:
    """Return T token ids for each sequence; one read from the device for all of them."""
    if not sequences:
        return []
    parts = [one.logits.argmax(dim=-1) if one.rule == GREEDY else _choices(one) for one in sequences]
    choices = torch.cat(parts).tolist()
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.shape[0])
    return [choices[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]


def token_logprobs(logits: torch.Tensor, chosen: Sequence[int], top_count: int) -> list[TokenLogprobs]:
    """Log-probabilities of the model itself, before any parameter: of the chosen tokens [T] and the likeliest ones."""
    logprobs = logits[: len(chosen)].float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(chosen, device=logits.device)[:, None])[:, 0].tolist()
    top = logprobs.topk(min(top_count, logits.shape[1]))
    return [
        TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
        for logprob, ids, values in zip(own, top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def _choices(one: Choosing) -> torch.Tensor:
    """Choices [T] under a rule that is more than the likeliest token."""
    sampling = one.rule.sampling
    logits = _processed(one)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scores = filtered(logits / sampling.temperature, sampling)
    positions = range(len(one.prefix), len(one.prefix) + scores.shape[0])
    left = int((scores > float("-inf")).sum(-1).max())
    if left * SPARSE_SHARE > scores.shape[1]:
        token_ids = torch.arange(scores.shape[1], device=scores.device)
        return (scores.double() + gumbel(one.rule.seed, positions, token_ids)).argmax(dim=-1)
    best = scores.topk(left)
    winners = (best.values.double() + gumbel(one.rule.seed, positions, best.indices)).argmax(dim=-1, keepdim=True)
    return best.indices.gather(1, winners)[:, 0]


def filtered(scores: torch.Tensor, sampling: SamplingParameters) -> torch.Tensor:
    """Rule out tokens by top-k, then top-p, then min-p, each over what the one before left: [T, V].

    Tokens as likely as the last one kept stay, so that no order among equals can matter.
    """
    nothing = float("-inf")
    if 0 < sampling.top_k < scores.shape[1]:
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, nothing)
    if sampling.top_p < 1:
        ordered = scores.sort(dim=-1, descending=True).values
        reached = ordered.softmax(-1).cumsum(-1)
        # The first token that brings the sum to top_p is the last one kept.
        last = (reached < sampling.top_p).sum(-1, keepdim=True).clamp_max(scores.shape[1] - 1)
        scores = scores.masked_fill(scores < ordered.gather(1, last), nothing)
    if sampling.min_p > 0:
        least = scores.max(-1, keepdim=True).values + torch.tensor(sampling.min_p).log().item()
        scores = scores.masked_fill(scores < least, nothing)
    return scores


def _processed(one: Choosing) -> torch.Tensor:
    """Logits in float32 after what the request adds to or takes from single tokens, in this order: bias, repetition
    penalty (Keskar et al., arXiv 1909.05858), presence and frequency penalties, end tokens that come too early.
    """
    sampling, logits = one.rule.sampling, one.logits.float().clone()
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        logits[:, list(token_ids)] += torch.tensor(biases, device=logits.device)
    if sampling.has_penalties:
        for row in range(logits.shape[0]):
            _penalise(logits[row], sampling, one.rule.prompt_count, [*one.prefix, *one.following[:row]])
    first_end = one.rule.prompt_count + sampling.min_new_tokens
    early = max(0, min(logits.shape[0], first_end - len(one.prefix)))
    if early:
        logits[:early, list(one.rule.end_token_ids)] = float("-inf")
    return logits


def _penalise(row: torch.Tensor, sampling: SamplingParameters, prompt_count: int, history: Sequence[int]) -> None:
    """Lower, in place, the logits [V] of tokens that were used: anywhere, or in the output, or often there."""
    if sampling.repetition_penalty != 1:
        used = torch.tensor(sorted(set(history)), device=row.device)
        values = row[used]
        row[used] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    counts = Counter(history[prompt_count:])
    if counts and (sampling.presence_penalty or sampling.frequency_penalty):
        token_ids = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), device=row.device)
        row[token_ids] -= sampling.presence_penalty + sampling.frequency_penalty * times
