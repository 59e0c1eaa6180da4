"""A client's prediction: it is followed while the output agrees, and found again after each edit."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.drafting.indexed_text import IndexedText
from coordinator.drafting.prediction import CERTAIN, NEAR_TOKENS, Prediction
from coordinator.requests.committed_tokens import CommittedTokens, packed
from coordinator.requests.guess import Guess
from tests.tools import built_suffixes

LINE_END = 1
LINES = [[100 * line + place for place in range(2, 12)] + [LINE_END] for line in range(1, 31)]
"""Lines of a text in which no token but the line's end comes twice."""
NEW = [7000, 7001, 7002, LINE_END]
NOTHING: list[int] = []
TOKENS = st.lists(st.integers(0, 4), max_size=30)


def flat(lines: list[list[int]]) -> list[int]:
    return sum(lines, [])


def rounds_of(prediction: list[int], output: list[int]) -> int:
    """Return the number of rounds that the output takes with guesses from the prediction."""
    source, count = Prediction(IndexedText(built_suffixes(), packed(prediction))), 0
    context: list[int] = []
    while len(context) < len(output):
        guess = source.guess(context, 8)
        left = output[len(context) :]
        right = 0
        for token_id, right_id in zip(guess.token_ids if guess else (), left, strict=False):
            if token_id != right_id:
                break
            right += 1
        context += left[: right + 1]
        count += 1
    return count


def test_it_starts_at_the_beginning() -> None:
    assert Prediction(IndexedText(built_suffixes(), packed([1, 2, 3]))).guess(NOTHING, 2) == Guess(
        (1, 2), 0, (1.0, 1.0)
    )


def test_it_goes_on_where_the_output_agrees() -> None:
    prediction = Prediction(IndexedText(built_suffixes(), packed([1, 2, 3, 4, 5])))
    assert prediction.guess([1], 2) == Guess((2, 3), 1, (1.0, 1.0))
    assert prediction.guess([1, 2, 3], 5) == Guess((4, 5), 3, (1.0, 1.0))
    assert prediction.guess([1, 2, 3, 4, 5], 5) is None


def test_what_stands_before_the_output_is_no_part_of_it() -> None:
    prediction = Prediction(IndexedText(built_suffixes(), packed([1, 2, 3, 4, 5])), prompt_count=3)
    assert prediction.guess([3, 4, 5], 2) == Guess((1, 2), 0, (1.0, 1.0))
    assert prediction.guess([3, 4, 5, 1], 2) == Guess((2, 3), 1, (1.0, 1.0))


def guess_after(prediction: list[int], *pieces: list[int], prompt: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the token that is guessed after an output that came in pieces; none without a guess."""
    source = Prediction(IndexedText(built_suffixes(), packed(prediction)), len(prompt))
    context = list(prompt)
    for piece in pieces:
        context += piece
        guess = source.guess(context, 1)
    return guess.token_ids if guess else ()


UNLIKE = [*range(1000, 1000 + NEAR_TOKENS)]
"""Tokens that no output has."""
SURE = [*range(30, 30 + CERTAIN)]
"""Tokens that make a place certain. They come in two pieces: what the output is aligned by counts as two tokens."""


def test_after_a_difference_it_goes_on_after_the_first_pair_of_the_same_tokens() -> None:
    prediction = [5, 6, 3, 2, 9, 1, 2, 7, 1, 2, 8]
    assert guess_after(prediction, [1, 2]) == (7,)
    assert guess_after(prediction, [4], [1], [2]) == (7,)
    assert guess_after(prediction, [4, 2]) == ()


def test_a_pair_is_looked_for_from_the_last_certain_place() -> None:
    prediction = [1, 2, 7, *SURE, 50, 1, 2, 8]
    assert guess_after(prediction, SURE[:2], SURE[2:], [1, 2]) == (8,)
    assert guess_after(prediction, SURE[:2], SURE[2:-1], [1, 2]) == (7,), "one token less is not certain"


def test_a_pair_that_is_not_near_is_no_place() -> None:
    assert guess_after([*UNLIKE[2:], 1, 2, 7], [1, 2]) == (7,)
    assert guess_after([*UNLIKE[1:], 1, 2, 7], [1, 2]) == ()


def test_far_away_it_goes_on_after_five_of_the_same_tokens() -> None:
    prediction = [*UNLIKE, 1, 2, 3, 4, 5, 7]
    assert guess_after(prediction, [1, 2, 3, 4, 5]) == (7,)
    assert guess_after(prediction, [9, 2, 3, 4, 5]) == ()


def test_of_places_far_away_the_nearest_ahead_comes_first_and_then_the_longest_match() -> None:
    moved, longer = [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]
    before, after = [*moved, 6, *longer, 7], [*UNLIKE, *moved, 8, *longer, 9]
    read = (SURE[:2], SURE[2:], longer)
    assert guess_after([*before, *SURE, *after], *read) == (8,)
    assert guess_after([*before, *SURE], *read) == (7,)
    assert guess_after([*longer, 7, *moved, 6, *SURE], *read) == (7,)


def test_a_pair_that_begins_in_the_prompt_is_none() -> None:
    prediction = [5, 6, 1, 2, 7]
    assert guess_after(prediction, [2], prompt=(4, 1)) == ()
    assert guess_after(prediction, [1, 2], prompt=(4, 1)) == (7,)


def test_a_right_prediction_takes_no_more_rounds_than_it_must() -> None:
    output = flat(LINES)
    assert rounds_of(output, output) == -(-len(output) // 9)


@pytest.mark.parametrize(
    ("output", "late"),
    [
        pytest.param([*LINES[:9], NEW, *LINES[10:]], 1, id="a line replaced"),
        pytest.param([*LINES[:9], NEW, *LINES[9:]], 1, id="a line inserted"),
        pytest.param([*LINES[:9], *LINES[10:]], 1, id="a line deleted"),
        pytest.param([NEW, *LINES], 1, id="another beginning"),
        pytest.param([LINES[20], *LINES[:20], *LINES[21:]], 6, id="a line moved to the front"),
        pytest.param([*LINES[:9], *LINES[25:]], 1, id="much deleted"),
        pytest.param([*LINES[:9], *[NEW] * 10, *LINES[9:]], 1, id="much inserted"),
    ],
)
def test_after_an_edit_it_is_found_again(output: list[list[int]], late: int) -> None:
    """`late` is the rounds beside one for each new token: a pair of the same tokens must have come first."""
    new_count = sum(len(line) for line in output if line == NEW)
    least = -(-len(flat(output)) // 9)
    assert rounds_of(flat(LINES), flat(output)) <= least + new_count + late


def test_with_one_line_in_ten_replaced_most_tokens_are_still_guessed() -> None:
    draw = random.Random(3)
    # A text like a program's: few different tokens, so that pairs come again and again.
    lines = [[LINE_END, *[draw.randrange(2, 40) for _ in range(draw.randint(4, 14))]] for _ in range(100)]
    edited = [
        [LINE_END, *draw.choices(range(2, 40), k=8)] if number % 10 == 5 else one for number, one in enumerate(lines)
    ]
    output = flat(edited)
    assert len(output) / rounds_of(flat(lines), output) > 5


@given(TOKENS, st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), max_size=10))
def test_every_guess_is_a_part_of_the_prediction(token_ids: list[int], pieces: list[list[int]]) -> None:
    prediction = Prediction(IndexedText(built_suffixes(), packed(token_ids)))
    output: list[int] = []
    for piece in pieces:
        output += piece
        if guess := prediction.guess(output, 4):
            assert guess.match_length <= len(output)
            found = [*output[len(output) - guess.match_length :], *guess.token_ids]
            assert any(token_ids[start : start + len(found)] == found for start in range(len(token_ids)))


class CountedOutput(CommittedTokens):
    """An output that counts the tokens that are read of it."""

    read_count = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.read_count += len(found) if isinstance(place, slice) else 1
        return found


def test_a_round_reads_new_tokens_only() -> None:
    prediction, output = Prediction(IndexedText(built_suffixes(), packed(range(1000)))), CountedOutput(packed([]))
    for token_id in range(1000):
        output += [token_id]
        prediction.guess(output, 4)
    assert output.read_count == 1000


def test_an_empty_prediction_guesses_nothing() -> None:
    assert Prediction(IndexedText(built_suffixes(), packed(NOTHING))).guess(NOTHING, 4) is None
    assert Prediction(IndexedText(built_suffixes(), packed(NOTHING))).guess([1, 2], 4) is None
