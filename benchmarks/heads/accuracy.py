"""How often heads are right on outputs they have not learnt, and what a round would gain by them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter

from paceline.engine.heads.interface import HeadsModule
from training.features import FrozenTarget, Text, Texts
from training.heads import outputs_by_place, rights

TOPS = (1, 5)


@dataclass(frozen=True)
class Accuracy:
    """Of one kind or variant."""

    parameter_count: int
    likeliest: tuple[float, ...]
    """Share of drafts that are the text's token, by place; a draft after others knows the text's tokens there."""
    top_5: tuple[float, ...]
    """Share of places where the text's token is among the five likeliest."""
    extra_tokens: float
    """Accepted drafts a round, when each round drafts a token for every place, the likeliest one."""


Accuracies = TypeAdapter(dict[str, Accuracy])
"""By name of the kind or variant."""


def measure(heads: HeadsModule, target: FrozenTarget, texts: Texts) -> Accuracy:
    counts = {top: [0] * heads.draft_count for top in TOPS}
    totals = [0] * heads.draft_count
    accepted = rounds = 0
    with torch.inference_mode():
        for batch in texts.one_by_one():
            places = outputs_by_place(heads, target, batch)
            found = [rights(output, target, batch, wanted, TOPS) for output, wanted in places]
            for place, by_top in enumerate(found):
                totals[place] += len(by_top[1])
                for top in TOPS:
                    counts[top][place] += int(by_top[top].sum())
            by_round = _accepted_by_round([one[1].tolist() for one in found], batch.texts[0])
            accepted, rounds = accepted + sum(by_round), rounds + len(by_round)
    shares = {top: tuple(map(_share, counts[top], totals)) for top in TOPS}
    parameter_count = sum(one.numel() for one in heads.parameters())
    return Accuracy(parameter_count, shares[1], shares[5], accepted / max(1, rounds))


def _share(right: int, total: int) -> float:
    return right / max(1, total)


def _accepted_by_round(rights: Sequence[Sequence[bool]], text: Text) -> list[int]:
    """Walk over the output as rounds do: each one gains its right drafts up to the first wrong one, and a token."""
    counts, last = list[int](), len(text) - 1
    chosen = text.prompt_count
    while chosen < last:
        count = 0
        while count < len(rights) and chosen + 1 + count <= last and rights[count][chosen + count - last]:
            count += 1
        counts.append(count)
        chosen += count + 1
    return counts
