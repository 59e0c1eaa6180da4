"""The rule that turns logits into choices. Draft and target use the same one.

At every position a model has one choice: a function of its logits there, the request's parameters, its seed and the
absolute position. Without temperature it is the most likely token, the lowest id among equals; with temperature it is
the Gumbel-maximum `argmax(log p + G)`, whose `G` both models draw alike (Daliri, Musco, Suresh, arXiv 2408.07978).

Logits allow no choice if one is NaN or plus infinity, or if no token is left. The highest score, which is read anyway,
shows that: NaN counts as the highest of all, and nothing here removes it.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import isfinite
from typing import TypeVar

import torch

from paceline.engine.noise import gumbel, gumbel_at, signed64, stream_starts
from paceline.engine.row_choice import NO_TOKEN, Chooser, RankedToken, Ranker, is_by_logits, is_plain
from paceline.engine.threads import choice_threads
from paceline.errors import InvalidRequest, NoChoice, PacelineError
from paceline.planning.memory import choice_places
from paceline.types import GREEDY, ChoiceRule, SamplingParameters, TokenLogprobs

SPARSE_SHARE = 4
"""When filters leave at most one token in this many, noise is drawn for the remaining tokens alone."""
LOGPROB_ROWS = 64
"""Rows of logits of which log-probabilities are computed at once: that takes the logits' memory twice more."""
NUCLEUS_COUNTS = (512, 8192)
"""Numbers of likeliest tokens that top-p tries in turn before it sorts the whole vocabulary."""

Choice = int | PacelineError
"""A token id, or why there is none."""
PlaceT = TypeVar("PlaceT")


@dataclass(frozen=True)
class Choosing:
    """The inputs to the choices of one sequence."""

    logits: torch.Tensor
    """[T, V]: after the prefix, and after each of the T - 1 tokens that follow it."""
    rule: ChoiceRule
    prefix: Sequence[int]
    following: Sequence[int] = ()
    allowed: torch.Tensor | None = None
    """[T, V]: the tokens that the rule's response format allows at each place; None without a format."""

    def __post_init__(self) -> None:
        assert (self.allowed is None) is (self.rule.response_format is None)


def choose(sequences: Sequence[Choosing], chooser: Chooser | None = None) -> list[list[Choice]]:
    """Return T choices for each sequence. The backend's `chooser` makes those that it can, all at once."""
    known, apart = list[int](), list[int]()
    for index, one in enumerate(sequences):
        (known if chooser and chooser.knows(one.rule) else apart).append(index)
    found: dict[int, list[Choice]] = {}
    if chooser and known:
        found |= zip(known, _choose_together([sequences[index] for index in known], chooser), strict=True)
    if apart:
        found |= zip(apart, _choose_apart([sequences[index] for index in apart]), strict=True)
    return [found[index] for index in range(len(sequences))]


def _choose_together(sequences: Sequence[Choosing], chooser: Chooser) -> list[list[Choice]]:
    logits = [one.logits if is_by_logits(one.rule) else processed(one) for one in sequences]
    choices: list[Choice] = [*chooser.choose(logits, *_rows(sequences))]
    if NO_TOKEN in choices:
        places = [(one, row) for one in sequences for row in range(one.logits.shape[0])]
        rows = [row for part in logits for row in part]
        choices = [
            _error(one, row, float(scores.max())) if choice == NO_TOKEN else choice
            for (one, row), scores, choice in zip(places, rows, choices, strict=True)
        ]
    return _parted(choices, sequences)


def _rows(sequences: Sequence[Choosing]) -> tuple[list[ChoiceRule], list[int]]:
    """Return the rule and the position of each place of the sequences."""
    rules, positions = list[ChoiceRule](), list[int]()
    for one in sequences:
        count, start = one.logits.shape[0], len(one.prefix)
        rules += [one.rule] * count
        positions += range(start, start + count)
    return rules, positions


def _parted(places: Sequence[PlaceT], sequences: Sequence[Choosing]) -> list[list[PlaceT]]:
    """Part what was found at all places by sequence."""
    ends = accumulate((one.logits.shape[0] for one in sequences), initial=0)
    return [[*places[start:stop]] for start, stop in pairwise(ends)]


def _choose_apart(sequences: Sequence[Choosing]) -> list[list[Choice]]:
    """Choose by torch, one sequence after the other."""
    with choice_threads(max(one.logits.numel() for one in sequences)):
        highest: list[float] = []
        choices: list[Choice] = []
        for one in chain.from_iterable(map(_few_places, sequences)):
            scores, token_ids = one.logits.max(dim=-1) if one.rule == GREEDY else _best(one)
            # Not kept as tensors: a small one in the room of a freed large one sends the next large one elsewhere.
            highest += scores.tolist()
            choices += token_ids.tolist()
    # This check is on the host: on the device it would take as many operations again as the choice.
    if not all(map(isfinite, highest)):
        places = [(one, row) for one in sequences for row in range(one.logits.shape[0])]
        choices = [
            choice if isfinite(score) else _error(one, row, score)
            for (one, row), score, choice in zip(places, highest, choices, strict=True)
        ]
    return _parted(choices, sequences)


def _few_places(one: Choosing) -> Iterator[Choosing]:
    """Cut a sequence that is drawn for into parts of so few places that noise and scores take little memory."""
    most, count = choice_places(one.logits.shape[1]), one.logits.shape[0]
    if one.rule == GREEDY or count <= most:
        yield one
        return
    for start in range(0, count, most):
        stop = min(start + most, count)
        yield Choosing(
            one.logits[start:stop],
            one.rule,
            (*one.prefix, *one.following[:start]),
            one.following[start : stop - 1],
            None if one.allowed is None else one.allowed[start:stop],
        )


def no_choice(position: int) -> NoChoice:
    """Return the error that says why no token can be chosen at an absolute position."""
    return NoChoice(
        f"the model's logits at position {position} allow no choice: one is not a number or plus infinity, or all are "
        "minus infinity; check its weights, or serve it with --dtype float32"
    )


def _error(one: Choosing, row: int, score: float) -> PacelineError:
    """Return the error that says why a row with this highest score has no choice."""
    position = len(one.prefix) + row
    if score != float("-inf"):
        return no_choice(position)
    if position < _first_end(one.rule):
        by = "the model" if one.allowed is None else "response_format"
        return InvalidRequest(
            f"min_new_tokens is {one.rule.sampling.min_new_tokens}, but at position {position} {by} allows only "
            "tokens that end the output; give a lower one",
            field="sampling.min_new_tokens",
        )
    if one.allowed is not None:
        return InvalidRequest(
            f"response_format leaves no token at position {position}: what it asks for there is too complex, or the "
            "model's tokens cannot write it; give a simpler one",
            field="response_format",
        )
    return no_choice(position)


def token_logprobs(logits: torch.Tensor, chosen: Sequence[int], top_count: int) -> list[TokenLogprobs]:
    """Return the model's log-probabilities, before any parameter, of the chosen tokens [T] and of the likeliest."""
    starts = range(0, len(chosen), LOGPROB_ROWS)
    with choice_threads(logits[:LOGPROB_ROWS].numel()):
        parts = (
            _token_logprobs(logits[one : one + LOGPROB_ROWS], chosen[one : one + LOGPROB_ROWS], top_count)
            for one in starts
        )
        return [logprobs for part in parts for logprobs in part]


def _token_logprobs(logits: torch.Tensor, chosen: Sequence[int], top_count: int) -> list[TokenLogprobs]:
    logprobs = logits[: len(chosen)].float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(chosen, device=logits.device)[:, None])[:, 0].tolist()
    top = logprobs.topk(min(top_count, logits.shape[1]))
    return [
        TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
        for logprob, ids, values in zip(own, top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def ranked(sequences: Sequence[Choosing], count: int, ranker: Ranker | None = None) -> list[list[list[RankedToken]]]:
    """Return for each sequence the `count` tokens with the highest scores at each of its T places, the choice first.

    A place without a choice has none. The estimates are the softmax of the scores of these tokens, noise included:
    another model has the same noise and other logits. The backend's `ranker` finds those of plain rules.
    """
    found: dict[int, list[list[RankedToken]]] = {}
    plain = [index for index, one in enumerate(sequences) if is_plain(one.rule)]
    with choice_threads(max(one.logits.numel() for one in sequences)):
        for indices in _few_at_once(plain, sequences):
            together = [sequences[index] for index in indices]
            made = (
                ranker.rank([one.logits for one in together], *_rows(together), count)
                if ranker
                else _ranked(*_plain_scores(together), count)
            )
            found |= zip(indices, _parted(made, together), strict=True)
        for index in set(range(len(sequences))).difference(plain):
            found[index] = _ranked(*_scores(sequences[index]), count)
    return [found[index] for index in range(len(sequences))]


def _few_at_once(indices: Sequence[int], sequences: Sequence[Choosing]) -> Iterator[list[int]]:
    """Yield the sequences' indices, together as many as have few places, or one with more."""
    together, places = list[int](), 0
    for index in indices:
        one = sequences[index].logits
        if together and places + one.shape[0] > choice_places(one.shape[1]):
            yield together
            together, places = [], 0
        together.append(index)
        places += one.shape[0]
    if together:
        yield together


def _plain_scores(sequences: Sequence[Choosing]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of plain rules as `_scores` does, for all sequences at once: many are made between calls."""
    logits = torch.cat([one.logits for one in sequences]).float()
    device = logits.device
    token_ids = torch.arange(logits.shape[1], device=device)
    rules, places = _rows(sequences)
    temperatures = torch.tensor([rule.sampling.temperature for rule in rules], device=device)[:, None]
    if not temperatures.any():
        return logits, token_ids.expand_as(logits)
    seeds = torch.tensor([signed64(rule.seed) for rule in rules], device=device)
    positions = torch.tensor(places, device=device)
    noise = gumbel_at(stream_starts(seeds, positions), token_ids) * (temperatures > 0)
    return (logits / temperatures.where(temperatures > 0, 1.0)).double() + noise, token_ids.expand_as(logits)


def _ranked(scores: torch.Tensor, token_ids: torch.Tensor, count: int) -> list[list[RankedToken]]:
    """Return the highest of scores [T, N] of tokens [T, N]."""
    highest, choices = scores.max(dim=-1)
    top = scores.topk(min(count, scores.shape[1]))
    found = token_ids.gather(1, torch.cat([choices[:, None], top.indices], 1)).tolist()
    places = zip(highest.tolist(), found, top.values.softmax(-1).tolist(), strict=True)
    # Of equal scores, topk may name another token first than the choice.
    return [
        [RankedToken(*pair) for pair in zip(dict.fromkeys(ids), shares, strict=False) if pair[1] > 0]
        if isfinite(score)
        else []
        for score, ids, shares in places
    ]


def _best(one: Choosing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest scores [T] and their tokens [T] under a rule other than plain greedy."""
    scores, token_ids = _scores(one)
    highest, places = scores.max(dim=-1, keepdim=True)
    return highest[:, 0], token_ids.gather(1, places)[:, 0]


def _scores(one: Choosing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [T, N], the highest of which is the choice, and their tokens [T, N]."""
    sampling = one.rule.sampling
    logits = processed(one)
    if sampling.temperature == 0:
        return logits, torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    scores = filtered(logits / sampling.temperature, sampling)
    positions = range(len(one.prefix), len(one.prefix) + scores.shape[0])
    left = _left_count(scores)
    if left * SPARSE_SHARE > scores.shape[1]:
        token_ids = torch.arange(scores.shape[1], device=scores.device)
        return scores.double() + gumbel(one.rule.seed, positions, token_ids), token_ids.expand_as(scores)
    likeliest = scores.topk(left)
    return likeliest.values.double() + gumbel(one.rule.seed, positions, likeliest.indices), likeliest.indices


def _left_count(scores: torch.Tensor) -> int:
    """Return how many tokens of any row of [T, V] the filters left; all, where the host would have to wait for it."""
    return max(1, int((scores > float("-inf")).sum(-1).max())) if scores.device.type == "cpu" else scores.shape[1]


def filtered(scores: torch.Tensor, sampling: SamplingParameters) -> torch.Tensor:
    """Rule out tokens of scores [T, V] by top-k, then top-p, then min-p, each over what the one before left.

    Tokens as likely as the last one kept stay, so that the order of equals does not matter.
    """
    nothing = float("-inf")
    if 0 < sampling.top_k < scores.shape[1]:
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, nothing)
    if sampling.top_p < 1:
        scores = scores.masked_fill(scores < _nucleus_end(scores, sampling.top_p), nothing)
    if sampling.min_p > 0:
        least = scores.max(-1, keepdim=True).values + torch.tensor(sampling.min_p).log().item()
        scores = scores.masked_fill(scores < least, nothing)
    return scores


def _nucleus_end(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the score [T, 1] of the token at which the sum of the likeliest tokens' probabilities reaches `top_p`.

    A row's score depends on that row alone, because the softmax is taken row by row and the leading terms are summed in
    order. The number of rows does not matter, nor the number of tokens that any row needed.
    """
    probabilities = scores.softmax(-1)
    for ordered in _likeliest(scores):
        reached = probabilities.gather(1, ordered.indices).cumsum(-1, dtype=torch.float64)
        count = reached.shape[1]
        if count == scores.shape[1] or not (reached[:, -1] < top_p).any():
            break
    last = (reached < top_p).sum(-1, keepdim=True).clamp_max(count - 1)
    return ordered.values.gather(1, last)


def _likeliest(scores: torch.Tensor) -> Iterator[torch.return_types.topk | torch.return_types.sort]:
    """Yield the highest of scores [T, V] in order: more each time, and all of them last."""
    # Other devices sort fast, and the host would have to wait for them to see whether some tokens are enough.
    for count in NUCLEUS_COUNTS if scores.device.type == "cpu" else ():
        if count < scores.shape[1]:
            yield scores.topk(count)
    yield scores.sort(dim=-1, descending=True)


def processed(one: Choosing) -> torch.Tensor:
    """Return the logits in float32 after the changes to single tokens that the request asks for.

    Their order is: bias, repetition penalty (Keskar et al., arXiv 1909.05858), presence and frequency penalties,
    removal of end tokens that come too early and of what the response format does not allow.
    """
    sampling, logits = one.rule.sampling, one.logits.to(torch.float32, copy=True)
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        logits[:, list(token_ids)] += torch.tensor(biases, device=logits.device)
    if sampling.has_penalties:
        _penalise(logits, one)
    early = max(0, min(logits.shape[0], _first_end(one.rule) - len(one.prefix)))
    if early:
        # Infinity is subtracted, not written, so that NaN stays NaN.
        logits[:early, list(one.rule.end_token_ids)] -= float("inf")
    if one.allowed is not None:
        logits -= torch.where(one.allowed, 0.0, float("inf"))
    return logits


def _first_end(rule: ChoiceRule) -> int:
    """Return the first position where the output may end."""
    return rule.prompt_count + rule.sampling.min_new_tokens


def _penalise(logits: torch.Tensor, one: Choosing) -> None:
    """Lower, in place, the logits [T, V] of tokens that were used anywhere, in the output, or often in the output."""
    sampling = one.rule.sampling
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        token_ids, counts = _used(one, 0, logits)
        values = logits.gather(1, token_ids)
        lower = torch.where(values > 0, values / penalty, values * penalty)
        logits.scatter_(1, token_ids, torch.where(counts > 0, lower, values))
    if sampling.presence_penalty or sampling.frequency_penalty:
        token_ids, counts = _used(one, one.rule.prompt_count, logits)
        lowered_by = sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
        logits.scatter_(1, token_ids, logits.gather(1, token_ids) - lowered_by)


def _used(one: Choosing, start: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct tokens from position `start` on, and how often each row sees them before it: both [T, N].

    The history is read once for all rows.
    """
    row_count = logits.shape[0]
    history = array("q", [*one.prefix, *one.following[: row_count - 1]][start:])
    tokens = torch.frombuffer(history, dtype=torch.int64) if history else torch.empty(0, dtype=torch.int64)
    token_ids, columns = torch.unique(tokens, return_inverse=True)
    # The first row sees the prefix, and each further row sees one token more.
    first_rows = (torch.arange(len(history)) + start - len(one.prefix) + 1).clamp_min(0)
    new = torch.zeros((row_count, len(token_ids)))
    new.index_put_((first_rows, columns), torch.ones(len(history)), accumulate=True)
    return token_ids.expand(row_count, -1).to(logits.device), new.cumsum(0).to(logits.device)
