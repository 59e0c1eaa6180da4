"""Exact and partial match, as the paper defines them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from paceline.measure.equivalence.agreement import (
    Mismatch,
    find_mismatches,
    match,
    match_rates,
    match_strings,
    no_gap,
    pooled,
)
from paceline.measure.equivalence.equivalence import Agreement, partly_wrong
from paceline.measure.equivalence.report import mismatch_lines
from paceline.measure.prompts import MeasuredPrompt, read_text_codec

TOKENS = st.lists(st.integers(0, 5), max_size=12)
PROMPTS = [
    MeasuredPrompt("a", "qa", (1, 2), "How many rolls?"),
    MeasuredPrompt("b", "math", (3,)),
    MeasuredPrompt("c", "qa", (4,)),
]


@given(TOKENS, TOKENS)
def test_partial_match_is_a_share_and_whole_for_equal_outputs_only_where_none_is_cut_off(
    output: list[int], reference: list[int]
) -> None:
    found = match(output, reference)
    assert 0 <= found.partial <= 1
    assert found.exact == (output == reference)
    assert not found.exact or found.partial == 1
    if found.partial == 1:
        assert output[: len(reference)] == reference


@given(TOKENS, st.integers(0, 11), TOKENS)
def test_partial_match_counts_the_leading_equal_tokens_of_the_reference(
    reference: list[int], place: int, rest: list[int]
) -> None:
    if place < len(reference):
        output = [*reference[:place], reference[place] + 1, *rest]
        assert match(output, reference).partial == place / len(reference)


def test_tokens_after_the_reference_cost_the_exact_match_only() -> None:
    found = match([1, 2, 3], [1, 2])
    assert (found.exact, found.partial) == (False, 1.0)


def test_equal_strings_match_whatever_their_tokens() -> None:
    def letters(text: str) -> list[int]:
        return list(map(ord, text))

    assert match_strings("ab", "ab", letters).exact
    found = match_strings("abx", "abcd", letters)
    assert (found.exact, found.partial) == (False, 0.5)


def test_a_mismatch_names_prompt_place_tokens_and_the_logit_gap_after_the_common_prefix() -> None:
    asked: list[tuple[list[int], int, int]] = []

    def gap(prefix: object, expected: int, other: int) -> float:
        assert isinstance(prefix, list)
        asked.append((prefix, expected, other))
        return 0.25

    outputs, references = [[7, 8, 9], [5, 6], [1]], [[7, 9, 9], [5, 6], [1, 2]]
    assert find_mismatches(PROMPTS, outputs, references, gap) == [
        Mismatch("a", "qa", 1, 9, 8, 0.25, "How many rolls?"),
        Mismatch("c", "qa", 1, 2, None, None),
    ]
    assert asked == [([1, 2, 7], 9, 8)]
    assert find_mismatches(PROMPTS, references, references, no_gap) == []


@pytest.mark.slow
def test_rates_are_kept_by_category_and_pooled_by_prompt() -> None:
    codec = read_text_codec("builtin:target", "builtin:draft")
    one, other = codec.tokenizer.encode("Tom has 4 apples.").ids, codec.tokenizer.encode("Tom has 5 pears.").ids
    rates = match_rates(PROMPTS, [one, one, other], [one, other, other], codec)
    assert [(rate.category, rate.prompt_count, rate.exact_count) for rate in rates] == [("qa", 2, 2), ("math", 1, 0)]
    assert [rate.string_exact_count for rate in rates] == [2, 0]
    assert 0 < rates[1].partial < 1
    assert rates[1].partial == rates[1].string_partial
    overall = pooled(rates)
    assert (overall.prompt_count, overall.exact_count) == (3, 2)
    assert overall.partial == pytest.approx((2 + rates[1].partial) / 3)


def test_a_prediction_is_the_output_with_every_tenth_token_wrong() -> None:
    output = list(range(25))
    found = partly_wrong(output)
    assert [place for place, token in enumerate(found) if token != output[place]] == [9, 19]
    assert set(found) <= set(output)
    assert partly_wrong([]) == []


@pytest.mark.slow
def test_a_mismatch_is_told_with_its_prompt_place_both_tokens_and_the_gap() -> None:
    codec = read_text_codec("builtin:target", "builtin:draft")
    expected, got = (codec.tokenizer.encode(digit).ids[0] for digit in "47")
    prompt = "How many rolls does a baker make? " * 9
    mismatch = Mismatch("a", "qa", 12, expected, got, 0.25, prompt)
    agreement = Agreement("speculative", "eqspec", 4, "float32", "Hugging Face", True, (), (mismatch,))
    (line,) = mismatch_lines(agreement, codec)
    assert line.startswith(
        f"float32 eqspec B = 4 beside Hugging Face: prompt a (qa), token 12: {got} '7' for {expected} '4', "
        "logit gap 0.25; 'How many rolls does a baker make?"
    )
    assert len(line) < len(prompt)
    assert TypeAdapter(Agreement).dump_python(agreement)["mismatches"][0]["prompt"] == prompt
