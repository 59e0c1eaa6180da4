"""Agreement of outputs with reference outputs: exact and partial match, as arXiv 2510.22876 defines them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean

from paceline.measure.prompts import MeasuredPrompt
from paceline.text import TextCodec

Tokens = Sequence[int]
LogitGap = Callable[[Tokens, int, int], float | None]
"""Takes a prefix, the expected and the other token; returns by how much the target's logit of the first is higher."""


@dataclass(frozen=True)
class Match:
    """The match of one output with its reference."""

    exact: bool
    partial: float
    """Share of the reference's tokens that lead both; 1 when equal. Output beyond the reference costs nothing."""


@dataclass(frozen=True)
class Mismatch:
    """The first position where an output differs from its reference; a token is None where its side has ended."""

    prompt_id: str
    category: str
    position: int
    """Number of output tokens before it."""
    expected_token_id: int | None
    token_id: int | None
    logit_gap: float | None = None
    """The target's logit of the expected token less that of the other token, at this position."""
    prompt: str = ""


@dataclass(frozen=True)
class MatchRates:
    """Match rates over the prompts of a category; 1 is all."""

    category: str
    prompt_count: int
    exact_count: int
    partial: float
    string_exact_count: int
    """Number of equal decoded strings, special tokens included, as the paper counts."""
    string_partial: float
    """Partial match of those strings, tokenized again."""


def leading_equal_count(output: Tokens, reference: Tokens) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(output, reference, strict=False)))


def match(output: Tokens, reference: Tokens) -> Match:
    if list(output) == list(reference):
        return Match(True, 1.0)
    return Match(False, leading_equal_count(output, reference) / len(reference) if reference else 0.0)


def match_strings(output: str, reference: str, encode: Callable[[str], Tokens]) -> Match:
    """Compare strings as the paper does; if they differ, tokenize both again and match the tokens."""
    if output == reference:
        return Match(True, 1.0)
    return Match(False, match(encode(output), encode(reference)).partial)


def find_mismatches(
    prompts: Sequence[MeasuredPrompt], outputs: Sequence[Tokens], references: Sequence[Tokens], logit_gap: LogitGap
) -> list[Mismatch]:
    """Return the places where outputs differ from their references, in the order of the prompts."""
    return [
        _mismatch(prompt, output, reference, logit_gap)
        for prompt, output, reference in zip(prompts, outputs, references, strict=True)
        if list(output) != list(reference)
    ]


def no_gap(prefix: Tokens, expected_token_id: int, token_id: int) -> None:
    """Stand in for a `LogitGap` in comparisons without a target model."""


def _mismatch(prompt: MeasuredPrompt, output: Tokens, reference: Tokens, logit_gap: LogitGap) -> Mismatch:
    place = leading_equal_count(output, reference)
    expected, got = (tokens[place] if place < len(tokens) else None for tokens in (reference, output))
    gap = None
    if expected is not None and got is not None:
        gap = logit_gap([*prompt.token_ids, *reference[:place]], expected, got)
    return Mismatch(prompt.id, prompt.category, place, expected, got, gap, prompt.text)


def match_rates(
    prompts: Sequence[MeasuredPrompt], outputs: Sequence[Tokens], references: Sequence[Tokens], codec: TextCodec
) -> list[MatchRates]:
    """Return the rates of each category, in the order of the file."""
    by_category: dict[str, list[tuple[Tokens, Tokens]]] = {}
    for prompt, output, reference in zip(prompts, outputs, references, strict=True):
        by_category.setdefault(prompt.category, []).append((output, reference))
    return [_rates(category, pairs, codec) for category, pairs in by_category.items()]


def _rates(category: str, pairs: Sequence[tuple[Tokens, Tokens]], codec: TextCodec) -> MatchRates:
    def decode(tokens: Tokens) -> str:
        return codec.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def encode(text: str) -> Tokens:
        return codec.tokenizer.encode(text, add_special_tokens=False).ids

    matches = [match(output, reference) for output, reference in pairs]
    strings = [match_strings(decode(output), decode(reference), encode) for output, reference in pairs]
    return MatchRates(
        category,
        len(pairs),
        sum(one.exact for one in matches),
        fmean(one.partial for one in matches),
        sum(one.exact for one in strings),
        fmean(one.partial for one in strings),
    )


def pooled(rates: Sequence[MatchRates]) -> MatchRates:
    """Return the rates over all categories together."""
    count = sum(one.prompt_count for one in rates)
    return MatchRates(
        "all",
        count,
        sum(one.exact_count for one in rates),
        sum(one.partial * one.prompt_count for one in rates) / count,
        sum(one.string_exact_count for one in rates),
        sum(one.string_partial * one.prompt_count for one in rates) / count,
    )
