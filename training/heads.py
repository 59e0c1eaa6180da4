"""Training of heads on a target's own outputs: features are computed once, then heads learn from them alone.

The losses are Clover-2's (arXiv 2408.00264): cross-entropy against the target's distribution at each place, and for
kinds whose output is to be a feature behind the target's last norm, the distance from it. Later places count less.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.reading import new_heads

PLACE_WEIGHT = 0.7
"""Weight of a place's loss over that of the place before."""
DISTANCE_WEIGHT = 10.0
WARM_UP_STEPS = 50


@dataclass(frozen=True)
class Features:
    """A text, and what goes into the target's last norm at each of its tokens."""

    token_ids: Tensor
    """[T]"""
    features: Tensor
    """[T, H] in bfloat16"""
    prompt_count: int


class FrozenTarget:
    """The parts of a target that heads share: embeddings, last norm and head."""

    def __init__(self, module: Any) -> None:
        self.config = module.config
        self._module = module.eval().requires_grad_(False)

    def embedded(self, token_ids: Tensor) -> Tensor:
        found: Tensor = self._module.get_input_embeddings()(token_ids)
        return found

    def normed(self, features: Tensor) -> Tensor:
        found: Tensor = self._module.model.norm(features)
        return found

    def logits(self, output: Tensor) -> Tensor:
        found: Tensor = self._module.lm_head(output)
        return found

    @torch.no_grad()
    def features(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[Features]:
        """Return the features of texts, each with its number of prompt tokens."""
        found: list[Tensor] = []
        hook = self._module.model.norm.register_forward_hook(lambda module, inputs, output: found.append(inputs[0][0]))
        try:
            for token_ids, _ in texts:
                self._module.model(input_ids=torch.tensor([token_ids]))
        finally:
            hook.remove()
        return [
            Features(torch.tensor(token_ids), features.bfloat16(), prompt_count)
            for (token_ids, prompt_count), features in zip(texts, found, strict=True)
        ]


def begun_heads(kind: str, target: FrozenTarget, module: Any, draft_count: int) -> HeadsModule:
    """Return heads that begin as copies of the target's last layers and norm."""
    heads: HeadsModule = new_heads(kind, target.config, draft_count=draft_count)
    last = module.model.norm.weight
    with torch.no_grad():
        for name, part in heads.named_modules():
            if name in ("norm", "body_norm"):
                part.weight.copy_(last)
        if heads.body:
            count = len(heads.body.layers)
            for own, layer in zip(heads.body.layers, module.model.layers[-count:], strict=True):
                own.load_state_dict(layer.state_dict(), strict=False)
    return heads


def loss_of(heads: HeadsModule, target: FrozenTarget, text: Features) -> Tensor:
    """Return the loss of one text, over the places whose right token is of the output."""
    features, count = text.features.float(), len(text.token_ids) - 1
    embedded = target.embedded(text.token_ids[1:])
    right = target.normed(features)
    teacher = target.logits(right).softmax(-1)
    entered = heads.enter(features[:count], embedded)
    state = heads.leave(_through(heads, entered), embedded)
    loss = features.new_zeros(())
    places = 1 if heads.repeats_layers else heads.draft_count
    for place in range(places):
        # A state after token t drafts token t + 2 + place, which the target chooses at t + 1 + place.
        stop = len(right) - 1 - place
        if stop <= text.prompt_count:
            break
        kept = slice(max(0, text.prompt_count - 2 - place), stop)
        output = heads.output(state, place)[kept]
        wanted = slice(kept.start + 1 + place, stop + 1 + place)
        scores = target.logits(output).log_softmax(-1)
        part = -(teacher[wanted] * scores).sum(-1).mean()
        if heads.kind in ("clover2", "eagle"):
            part = part + DISTANCE_WEIGHT * F.smooth_l1_loss(output, right[wanted])
        loss = loss + PLACE_WEIGHT**place * part
        if place + 1 < places:
            following = target.embedded(text.token_ids[2 + place :])
            state = heads.follow(state[: len(following)], following)
    return loss


def _through(heads: HeadsModule, entered: Tensor) -> Tensor:
    if not heads.body:
        return entered
    made: Tensor = heads.body(inputs_embeds=entered[None], use_cache=False).last_hidden_state[0]
    return made


def right_counts(heads: HeadsModule, target: FrozenTarget, texts: Sequence[Features], top: int = 1) -> list[float]:
    """Return for each place the share of drafts among whose `top` likeliest tokens is the text's."""
    rights = [0] * heads.draft_count
    totals = [0] * heads.draft_count
    with torch.inference_mode():
        for text in texts:
            _count_rights(heads, target, text, top, rights, totals)
    return [right / max(1, total) for right, total in zip(rights, totals, strict=True)]


def _count_rights(
    heads: HeadsModule, target: FrozenTarget, text: Features, top: int, rights: list[int], totals: list[int]
) -> None:
    embedded = target.embedded(text.token_ids[1:])
    entered = heads.enter(text.features.float()[:-1], embedded)
    state = heads.leave(_through(heads, entered), embedded)
    for place in range(1 if heads.repeats_layers else heads.draft_count):
        right = text.token_ids[2 + place :]
        first = max(0, text.prompt_count - 2 - place)
        found = target.logits(heads.output(state, place)[first : len(right)]).topk(top).indices
        rights[place] += int((found == right[first:, None]).any(-1).sum())
        totals[place] += len(found)
        following = target.embedded(right)
        state = heads.follow(state[: len(following)], following)


def fit_heads(
    heads: HeadsModule,
    target: FrozenTarget,
    texts: Sequence[Features],
    *,
    minutes: float,
    peak_rate: float = 1e-3,
    batch_size: int = 8,
    seed: int = 4,
    report: Callable[[str], None] = lambda line: None,
) -> int:
    """Train until `minutes` have passed; return the number of steps."""
    parameters = [one for one in heads.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=peak_rate, betas=(0.9, 0.95))
    began, told, step = time.monotonic(), 0.0, 0
    heads.train()
    for batch in _batches(texts, batch_size, random.Random(seed)):
        share = (time.monotonic() - began) / (60 * minutes)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = peak_rate * min(1.0, (step + 1) / WARM_UP_STEPS) * (1.03 - share)
        losses = torch.stack([loss_of(heads, target, text) for text in batch])
        losses.mean().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if time.monotonic() - told > 20:
            told = time.monotonic()
            report(f"{share:5.1%} step {step} loss {losses.mean().item():.3f}")
    heads.eval()
    return step


def _batches(texts: Sequence[Features], size: int, rng: random.Random) -> Iterator[list[Features]]:
    while True:
        yield rng.sample(texts, min(size, len(texts)))
