"""How often heads are right on outputs they have not learnt, and what a round would gain by them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter
from torch import Tensor

from paceline.engine.heads.interface import HeadsModule
from training.features import Features, FrozenTarget
from training.heads import outputs_by_place, rights

ROWS_AT_ONCE = 32
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


def measure(heads: HeadsModule, target: FrozenTarget, texts: Sequence[Features]) -> Accuracy:
    counts = {top: [0] * heads.draft_count for top in TOPS}
    totals = [0] * heads.draft_count
    accepted = rounds = 0
    with torch.inference_mode():
        for text in texts:
            found = [rights(output, target, text, TOPS) for output in outputs_of(heads, target, text)]
            for place, by_top in enumerate(found):
                totals[place] += len(by_top[1])
                for top in TOPS:
                    counts[top][place] += int(by_top[top].sum())
            by_round = _accepted_by_round([one[1].tolist() for one in found], text)
            accepted, rounds = accepted + sum(by_round), rounds + len(by_round)
    shares = {top: tuple(map(_share, counts[top], totals)) for top in TOPS}
    parameter_count = sum(one.numel() for one in heads.parameters())
    return Accuracy(parameter_count, shares[1], shares[5], accepted / max(1, rounds))


def _share(right: int, total: int) -> float:
    return right / max(1, total)


def _accepted_by_round(rights: Sequence[Sequence[bool]], text: Features) -> list[int]:
    """Walk over the output as rounds do: each one gains its right drafts up to the first wrong one, and a token."""
    counts, last = list[int](), len(text.token_ids) - 1
    chosen = text.prompt_count
    while chosen < last:
        count = 0
        while count < len(rights) and chosen + 1 + count <= last and rights[count][chosen + count - last]:
            count += 1
        counts.append(count)
        chosen += count + 1
    return counts


def outputs_of(heads: HeadsModule, target: FrozenTarget, text: Features) -> Iterator[Tensor]:
    return repeated(heads, target, text) if heads.repeats_layers else outputs_by_place(heads, target, text)


def repeated(heads: HeadsModule, target: FrozenTarget, text: Features) -> Iterator[Tensor]:
    """Yield what `outputs_by_place` does, for kinds whose later drafts go through the layers again."""
    embedded = target.embedded(text.token_ids)
    entered = heads.enter(text.features.float(), embedded[1:])
    state = heads.leave(heads.body(inputs_embeds=entered[None]).last_hidden_state[0], embedded[1:])
    first = max(0, text.prompt_count - 1 - heads.draft_count)
    # For each token, what went through the layers after it.
    added = entered.new_zeros(len(entered), 0, entered.shape[1])
    for place in range(heads.draft_count):
        starts = torch.arange(first, len(entered) - 1 - place)
        state, added = state[: starts[-1] + 1], added[: starts[-1] + 1]
        yield heads.output(state[max(0, text.prompt_count - 2 - place) :], place)
        if place + 1 == heads.draft_count:
            return
        following = embedded[2 + place :]
        made = heads.follow(state[: len(following)], following)
        added = torch.cat((added[: len(made)], made[:, None]), dim=1)
        state = torch.zeros_like(made)
        for rows in torch.split(starts[starts < len(made)], ROWS_AT_ONCE):
            state[rows] = heads.leave(_last(heads, entered, added[rows], rows), following[rows])


def _last(heads: HeadsModule, entered: Tensor, added: Tensor, rows: Tensor) -> Tensor:
    """Return what the layers make of the last added row: for starts `rows` [R], with `added` [R, n, H] behind each."""
    count = added.shape[1]
    # Later rows cannot be seen by the earlier ones that are wanted.
    batch = entered.new_zeros(len(rows), int(rows.max()) + 1 + count, entered.shape[1])
    for line, row, own in zip(batch, rows.tolist(), added, strict=True):
        line[: row + 1] = entered[: row + 1]
        line[row + 1 : row + 1 + count] = own
    made: Tensor = heads.body(inputs_embeds=batch).last_hidden_state
    return made[torch.arange(len(rows)), rows + count]
