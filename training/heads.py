"""Training of heads on a target's own outputs: features are computed once, then heads learn from them alone.

The losses are Clover-2's (arXiv 2408.00264): cross-entropy against the target's distribution at each place, and for
kinds whose output is to be a feature behind the target's last norm, the distance from it. Later places count less.
Kinds that repeat their layers go through them here as they do where they are served, with states of their own
(training-time test: EAGLE-3, arXiv 2503.01840).
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.reading import new_heads
from training.features import Batch, FrozenTarget, Texts
from training.loop import Progress, fit, mixed_precision

PLACE_WEIGHT = 0.8
"""Weight of a place's loss over that of the place before."""
DISTANCE_WEIGHT = 2.0
TRIED_TOKENS = 4096
"""Most tokens of texts that heads are tried with at once, padding included."""


def begun_heads(kind: str, target: FrozenTarget, draft_count: int) -> HeadsModule:
    """Return heads that begin as copies of the target's last layers and norm."""
    heads: HeadsModule = new_heads(kind, target.config, draft_count=draft_count)
    begin(heads, target)
    return heads.to(target.device)


def begin(heads: HeadsModule, target: FrozenTarget) -> None:
    """Copy the target's last layers and norm into heads."""
    module: Any = target.module
    last = module.model.norm.weight
    with torch.no_grad():
        for name, part in heads.named_modules():
            if name in ("norm", "body_norm"):
                part.weight.copy_(last)
        if heads.body:
            count = len(heads.body.layers)
            for own, layer in zip(heads.body.layers, module.model.layers[-count:], strict=True):
                own.load_state_dict(layer.state_dict(), strict=False)


def loss_of(heads: HeadsModule, target: FrozenTarget, batch: Batch) -> Tensor:
    """Return the loss of texts, over the places whose right token is of the output."""
    places = [*outputs_by_place(heads, target, batch)]
    _, wanted = places[0]
    # What is to be drafted at later places is to be drafted at the first one too.
    rows = torch.zeros(batch.token_ids.numel(), dtype=torch.long)
    rows[wanted] = torch.arange(len(wanted))
    with torch.no_grad():
        before = batch.features.flatten(0, 1)[(wanted - 1).to(target.device)]
        right = target.normed(before.float())
        teacher = target.logits(right).float().softmax(-1)
    total = right.new_zeros(())
    for place, (output, drafted) in enumerate(places):
        own = rows[drafted].to(target.device)
        scores = target.logits(output).float().log_softmax(-1)
        loss = -(teacher[own] * scores).sum(-1).mean()
        if heads.kind in ("clover2", "eagle"):
            loss = loss + DISTANCE_WEIGHT * F.smooth_l1_loss(output.float(), right[own])
        total = total + PLACE_WEIGHT**place * loss
    return total


def outputs_by_place(heads: HeadsModule, target: FrozenTarget, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each place what the target's head reads, [N, H], and which tokens it is to draft, [N].

    These are tokens of outputs, all that have a state before them, as indexes into the batch's tokens laid end to end,
    on the CPU. The tokens before are the text's, the states the heads' own.
    """
    width = batch.token_ids.shape[1]
    lengths = torch.tensor([len(text) for text in batch.texts])[:, None]
    prompts = torch.tensor([text.prompt_count for text in batch.texts])[:, None]
    # The state at token t knows the token after it, and drafts token t + 2 + place.
    first = (prompts - 1 - heads.draft_count).clamp_min(0)
    starts = first + torch.arange(int((lengths - 2 - first).max().clamp_min(0)))
    embedded, layers = target.embedded(batch.token_ids), _Layers(heads, width - 2)
    entered = heads.enter(batch.features[:, :-2].float(), embedded[:, 1:-1])
    of_text = layers.through(entered, torch.arange(width - 2).expand(len(lengths), -1), 0)
    state = heads.leave(_at(of_text, starts), _at(embedded, starts + 1))
    for place in range(heads.draft_count):
        drafted = starts + 2 + place
        wanted = (drafted >= prompts) & (drafted < lengths)
        if not wanted.any():
            return
        chosen = wanted.flatten().nonzero()[:, 0].to(target.device)
        output = heads.output(state, place).flatten(0, 1).index_select(0, chosen)
        yield output, (torch.arange(len(lengths))[:, None] * width + drafted)[wanted]
        if place + 1 == heads.draft_count:
            return
        following = _at(embedded, drafted)
        state = heads.follow(state, following)
        if heads.repeats_layers:
            state = heads.leave(layers.through(state, starts, place + 1), following)


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    """Return the values [B, T, H] at some tokens [B, S] of each text, [B, S, H]; beyond the end, the last."""
    height, width = values.shape[:2]
    places = torch.arange(height)[:, None] * width + tokens.clamp_max(width - 1)
    return values.flatten(0, 1).index_select(0, places.flatten().to(values.device)).view(*tokens.shape, -1)


class _Layers:
    """The layers of heads over a batch: first over its texts, then over drafts, place by place, behind the texts."""

    def __init__(self, heads: HeadsModule, text_count: int) -> None:
        """`text_count` is T, the rows of each text."""
        self._body = heads.body
        self._text_count = text_count
        # From transformers 5.24 on models call it so, and the older name ends with 5.40.
        names = signature(heads.body.forward).parameters if heads.body else ()
        self._cache = {"cache" if "cache" in names else "past_key_values": DynamicCache()}

    def through(self, values: Tensor, starts: Tensor, part: int) -> Tensor:
        """Return what the layers make of rows [B, S, H]: of part 0 those of texts, of part p drafts of place p.

        `starts` [B, S] are the tokens of the text whose drafts rows belong to, the same for every place; a row of the
        text belongs to its own.
        """
        if not self._body:
            return values
        starts = starts.to(values.device)
        made = self._body(
            inputs_embeds=values,
            position_ids=starts + part,
            attention_mask=self._seen(starts, part)[:, None],
            use_cache=True,
            **self._cache,
        )
        hidden: Tensor = made.last_hidden_state
        return hidden

    def _seen(self, starts: Tensor, part: int) -> Tensor:
        """Return what rows see, [B, S, T + part * S]: their text up to their start, and its drafts so far."""
        height, count = starts.shape
        of_text = torch.arange(self._text_count, device=starts.device) <= starts[..., None]
        own = torch.eye(count, dtype=torch.bool, device=starts.device)
        return torch.cat((of_text, own.repeat(1, part).expand(height, -1, -1)), -1)


def right_shares(
    heads: HeadsModule, target: FrozenTarget, texts: Texts, tops: Sequence[int] = (1,)
) -> dict[int, list[float]]:
    """Return by top, for each place, the share of drafts among whose `top` likeliest tokens is the text's."""
    counts = {top: [0] * heads.draft_count for top in tops}
    totals = [0] * heads.draft_count
    with torch.inference_mode():
        for batch in texts.once(TRIED_TOKENS):
            for place, (output, wanted) in enumerate(outputs_by_place(heads, target, batch)):
                for top, right in rights(output, target, batch, wanted, tops).items():
                    counts[top][place] += int(right.sum())
                totals[place] += len(output)
    return {top: [count / max(1, total) for count, total in zip(counts[top], totals, strict=True)] for top in tops}


def rights(
    output: Tensor, target: FrozenTarget, batch: Batch, wanted: Tensor, tops: Sequence[int]
) -> dict[int, Tensor]:
    """Return by top whether the wanted tokens, one for each row of the output, are among the likeliest, [N]."""
    best = target.logits(output).topk(max(tops)).indices
    right = batch.token_ids.flatten()[wanted.to(target.device), None]
    return {top: (best[:, :top] == right).any(-1) for top in tops}


def fit_heads(
    heads: HeadsModule,
    target: FrozenTarget,
    texts: Texts,
    *,
    minutes: float = math.inf,
    step_count: float = math.inf,
    peak_rate: float = 3e-3,
    token_budget: int = 2048,
    seed: int = 4,
    report: Callable[[str], None] = lambda line: None,
) -> Progress:
    """Train for so many minutes or steps, each on a batch of at most `token_budget` tokens."""

    def loss_and_count(heads: HeadsModule, batch: Batch) -> tuple[Tensor, int]:
        with mixed_precision(target.device):
            return loss_of(heads, target, batch), batch.token_ids.numel()

    batches = texts.batches(token_budget, random.Random(seed))
    return fit(
        heads, batches, loss_and_count, minutes=minutes, most_steps=step_count, peak_rate=peak_rate, report=report
    )
