"""Training of heads on a target's own outputs: features are computed once, then heads learn from them alone.

The losses are Clover-2's (arXiv 2408.00264): cross-entropy against the target's distribution at each place, and for
kinds whose output is to be a feature behind the target's last norm, the distance from it. Later places count less.
Kinds that repeat their layers go through them here as they do where they are served, with states of their own
(training-time test: EAGLE-3, arXiv 2503.01840).
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.reading import new_heads
from training.features import Features, FrozenTarget

PLACE_WEIGHT = 0.7
"""Weight of a place's loss over that of the place before."""
DISTANCE_WEIGHT = 10.0
WARM_UP_STEPS = 50


def begun_heads(kind: str, target: FrozenTarget, draft_count: int) -> HeadsModule:
    """Return heads that begin as copies of the target's last layers and norm."""
    heads: HeadsModule = new_heads(kind, target.config, draft_count=draft_count)
    begin(heads, target)
    return heads


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


def loss_of(heads: HeadsModule, target: FrozenTarget, text: Features) -> Tensor:
    """Return the loss of one text, over the places whose right token is of the output."""
    right = target.normed(text.features[text.prompt_count - 1 :].float())
    teacher = target.logits(right).softmax(-1)
    total = right.new_zeros(())
    for place, output in enumerate(outputs_by_place(heads, target, text)):
        wanted = slice(len(right) - len(output), None)
        scores = target.logits(output).log_softmax(-1)
        loss = -(teacher[wanted] * scores).sum(-1).mean()
        if heads.kind in ("clover2", "eagle"):
            loss = loss + DISTANCE_WEIGHT * F.smooth_l1_loss(output, right[wanted])
        total = total + PLACE_WEIGHT**place * loss
    return total


def outputs_by_place(heads: HeadsModule, target: FrozenTarget, text: Features) -> Iterator[Tensor]:
    """Yield what the target's head reads for each place, [n, H]: for the last n tokens of the output.

    They are all that have a state before them. The tokens before are the text's, the states the heads' own.
    """
    embedded = target.embedded(text.token_ids)
    entered = heads.enter(text.features.float(), embedded[1:])
    count = len(entered) - 1  # the last token has none after it to draft
    # The state at token t knows the token after it, and drafts token t + 2 + place.
    first = max(0, text.prompt_count - 1 - heads.draft_count)
    rows = _Rows(entered[:count], torch.arange(count), torch.zeros(count, dtype=torch.long))
    state = heads.leave(_through(heads, rows)[first:], embedded[first + 1 : -1])
    for place in range(heads.draft_count):
        state = state[: count - place - first]
        skipped = max(0, text.prompt_count - 2 - place - first)
        if skipped >= len(state):
            return
        yield heads.output(state[skipped:], place)
        if place + 1 == heads.draft_count:
            return
        following = embedded[first + 2 + place : -1]
        state = heads.follow(state[: len(following)], following)
        if heads.repeats_layers:
            rows = rows.with_drafts(state, first)
            state = heads.leave(_through(heads, rows)[len(rows.values) - len(state) :], following)


@dataclass(frozen=True)
class _Rows:
    """What goes through layers at once: a text, then for each draft another part, with a row for each token."""

    values: Tensor
    """[R, H]"""
    starts: Tensor
    """The token of the text whose drafts a row belongs to, [R]; a row of the text belongs to its own."""
    parts: Tensor
    """The part of each row, [R]: 0 for the text, then the places of drafts."""

    def with_drafts(self, values: Tensor, first: int) -> "_Rows":
        """Add drafts of the tokens from `first` on."""
        return _Rows(
            torch.cat((self.values, values)),
            torch.cat((self.starts, torch.arange(first, first + len(values)))),
            torch.cat((self.parts, (self.parts[-1] + 1).expand(len(values)))),
        )

    def seen(self) -> Tensor:
        """Return which rows each one sees, [R, R]: the text up to its start, and its start's earlier drafts."""
        of_text = (self.parts == 0) & (self.starts <= self.starts[:, None])
        own = (self.starts == self.starts[:, None]) & (self.parts <= self.parts[:, None])
        return of_text | own


def _through(heads: HeadsModule, rows: _Rows) -> Tensor:
    """Return what the layers make of rows."""
    if not heads.body:
        return rows.values
    made = heads.body(
        inputs_embeds=rows.values[None],
        position_ids=(rows.starts + rows.parts)[None],
        attention_mask=rows.seen()[None, None],
        use_cache=False,
    )
    hidden: Tensor = made.last_hidden_state[0]
    return hidden


def right_shares(heads: HeadsModule, target: FrozenTarget, texts: Sequence[Features], top: int = 1) -> list[float]:
    """Return for each place the share of drafts among whose `top` likeliest tokens is the text's."""
    counts, totals = [0] * heads.draft_count, [0] * heads.draft_count
    with torch.inference_mode():
        for text in texts:
            for place, output in enumerate(outputs_by_place(heads, target, text)):
                counts[place] += int(rights(output, target, text, (top,))[top].sum())
                totals[place] += len(output)
    return [count / max(1, total) for count, total in zip(counts, totals, strict=True)]


def rights(output: Tensor, target: FrozenTarget, text: Features, tops: Sequence[int]) -> dict[int, Tensor]:
    """Return by top whether the text's last tokens, one for each row of the output, are among the likeliest, [n]."""
    best = target.logits(output).topk(max(tops)).indices
    wanted = text.token_ids[-len(best) :, None]
    return {top: (best[:, :top] == wanted).any(-1) for top in tops}


def fit_heads(
    heads: HeadsModule,
    target: FrozenTarget,
    texts: Sequence[Features],
    *,
    step_count: int,
    peak_rate: float = 3e-3,
    batch_size: int = 4,
    seed: int = 4,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Train for so many steps, each on a batch of texts; `report` gets the loss now and then."""
    parameters = [one for one in heads.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=peak_rate, betas=(0.9, 0.95))
    told = 0.0
    heads.train()
    for step, batch in enumerate(islice(_batches(texts, batch_size, random.Random(seed)), step_count)):
        rate = peak_rate * min(1.0, (step + 1) / WARM_UP_STEPS) * (1.03 - step / step_count)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses = torch.stack([loss_of(heads, target, text) for text in batch])
        losses.mean().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if time.monotonic() - told > 20:
            told = time.monotonic()
            report(f"step {step + 1} of {step_count}: loss {losses.mean().item():.3f}")
    heads.eval()


def _batches(texts: Sequence[Features], size: int, rng: random.Random) -> Iterator[list[Features]]:
    """Yield batches without end, all texts once before any comes again."""
    while True:
        shuffled = rng.sample(texts, len(texts))
        for start in range(0, len(texts), size):
            yield shuffled[start : start + size]
