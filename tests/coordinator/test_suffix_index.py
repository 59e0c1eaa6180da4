"""The suffix index: what it guesses did follow the same tokens earlier, as late and as long as can be found."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.drafting.indexed_text import COMPARED, IndexedText
from coordinator.drafting.suffix_index import SuffixIndex
from coordinator.requests.committed_tokens import CommittedTokens, packed
from coordinator.requests.guess import Guess
from paceline.checks import MAX_DRAFT_COUNT
from tests.tools import built_suffixes

FIRST_ROOM = 256
"""As in `suffixes.cpp`."""
TOKENS = st.lists(st.integers(0, 3), max_size=40)
PIECES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12)
ANY_TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2), max_size=80)


def suffixes_of(prompt: list[int]) -> SuffixIndex:
    return SuffixIndex(IndexedText(built_suffixes(), packed(prompt)))


def searched(prompt: list[int], output: list[int], most: int) -> Guess | None:
    """Return the guess as the rules say it, found by looking at every place.

    The four latest places of the output vote, and before them those of the prompt where the output has fewer.
    """
    text, first = prompt + output, len(prompt)
    for shortest in (4, 1):
        # What follows a place in the prompt ends with the prompt, if there is an output.
        parts = [(range(max(1, first), len(text)), text), (range(1, first), prompt)]
        found: list[tuple[int, list[int]]] = []
        for places, part in parts:
            own = [(common_length(text, place), following(part, place, most, text)) for place in places]
            found += [one for one in reversed(own) if one[0] >= shortest][:4] if len(found) < 4 else []
        if found:
            longest = max(length for length, _ in found)
            found.sort(key=lambda one: -one[0])
            token_ids, shares = voted([followers for length, followers in found[:4] if 2 * length >= longest])
            return Guess(token_ids, longest, shares)
    return None


def following(part: list[int], place: int, most: int, text: list[int]) -> list[int]:
    """Return what follows a place; after the end of the whole text what was found goes on with itself."""
    found = part[place : place + most]
    while len(part) == len(text) and len(found) < most:
        found.append(found[place - len(part)])
    return found


def common_length(text: list[int], place: int) -> int:
    """Return how many tokens before a place are the text's last ones, as far as they are compared."""
    most = min(COMPARED, place)
    return next((n for n in range(most) if text[place - 1 - n] != text[-1 - n]), most)


def voted(followers: list[list[int]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    token_ids: list[int] = []
    shares: list[float] = []
    while nexts := [
        one[len(token_ids)] for one in followers if one[: len(token_ids)] == token_ids and len(one) > len(token_ids)
    ]:
        ((token_id, count),) = Counter(nexts).most_common(1)
        token_ids.append(token_id)
        shares.append(count / len(nexts))
    return tuple(token_ids), tuple(shares)


def guess_after(prompt: list[int], *pieces: list[int], most: int = 5) -> Guess | None:
    return suffixes_of(prompt).guess([*prompt, *sum(pieces, [])], most)


@given(TOKENS, TOKENS, st.integers(1, 12))
def test_a_guess_is_what_a_search_of_all_places_finds(prompt: list[int], output: list[int], most: int) -> None:
    assert guess_after(prompt, output, most=most) == searched(prompt, output, most)


@given(TOKENS, PIECES, st.integers(1, 12))
def test_every_guess_followed_the_same_tokens_earlier(prompt: list[int], pieces: list[list[int]], most: int) -> None:
    index, context = suffixes_of(prompt), CommittedTokens(packed(prompt))
    for piece in pieces:
        context += piece
        guess, text = index.guess(context, most), context[:]
        places = [place for place in range(1, len(text)) if text[place - 1] == text[-1]]
        assert (guess is None) == (not places)
        if guess:
            assert 1 <= len(guess.token_ids) == len(guess.shares) <= most
            assert all(0 < share <= 1 for share in guess.shares)
            whole = [*text, *guess.token_ids]
            followed = [whole[place : place + len(guess.token_ids)] for place in places]
            assert list(guess.token_ids) in followed
            ending = text[len(text) - guess.match_length :]
            assert any(text[place - guess.match_length : place] == ending for place in places)


@given(TOKENS, PIECES)
def test_a_guess_does_not_depend_on_how_the_output_came(prompt: list[int], pieces: list[list[int]]) -> None:
    assert guess_after(prompt, *pieces) == guess_after(prompt, sum(pieces, []))


def test_a_longer_match_goes_before_a_later_one() -> None:
    assert guess_after([1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 9], [1, 2, 3, 4, 5], most=2) == Guess((6, 7), 5, (1.0, 1.0))


def test_of_equal_matches_most_decide_and_the_share_says_how_many() -> None:
    prompt = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 9]
    assert guess_after(prompt, [1, 2], most=2) == Guess((5, 7), 2, (2 / 3, 1 / 2))


def test_of_equal_matches_and_equal_counts_the_latest_decides() -> None:
    assert guess_after([1, 2, 5, 1, 2, 6, 7], [1, 2], most=1) == Guess((6,), 2, (0.5,))


def test_a_match_is_followed_as_long_as_it_goes_on_and_its_length_grows() -> None:
    prompt = list(range(100))
    index, context = suffixes_of(prompt), CommittedTokens(packed(prompt))
    for start in range(0, 60, 3):
        piece = list(range(start, start + 3))
        context += piece
        guess = index.guess(context, 4)
        assert guess and guess.token_ids == tuple(range(start + 3, start + 7))
    assert guess and guess.match_length > COMPARED


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_text_that_repeats_itself_is_guessed_beyond_its_end(period: int) -> None:
    """It was guessed up to its end: a loop of two tokens gave two drafts a round."""
    loop = list(range(period))
    index, context = suffixes_of([9, 9, *loop]), CommittedTokens(packed([9, 9, *loop]))
    for _ in range(8):
        context += loop
        guess = index.guess(context, 12)
        assert guess and guess.token_ids == tuple((loop * 12)[:12]) and set(guess.shares) == {1.0}


def test_so_is_one_that_began_in_the_prompt() -> None:
    assert guess_after([7, 1, 2], [7, 1, 2], most=6) == Guess((7, 1, 2, 7, 1, 2), 3, (1.0,) * 6)


def test_after_a_departure_another_match_is_looked_for() -> None:
    prompt = list(range(100))
    index, context = suffixes_of(prompt), CommittedTokens(packed(prompt))
    for piece, following in ((list(range(10, 20)), 20), ([70, 71], 72)):
        context += piece
        guess = index.guess(context, 1)
        assert guess and guess.token_ids == (following,)


@pytest.mark.parametrize("length", [FIRST_ROOM - 3, FIRST_ROOM, 3 * FIRST_ROOM + 1])
def test_what_came_before_is_found_wherever_a_text_became_full(length: int) -> None:
    repeated = list(range(10_000, 10_000 + COMPARED + 3))
    output = [*range(length), *repeated, *range(20_000, 20_000 + FIRST_ROOM), *repeated[:COMPARED]]
    guess = guess_after([1, 2, 3], output, most=1)
    assert guess == Guess((repeated[COMPARED],), COMPARED, (1.0,))


def test_what_was_copied_while_no_place_was_looked_for_is_found_later() -> None:
    prompt = list(range(2 * FIRST_ROOM))
    index, context = suffixes_of(prompt), CommittedTokens(packed(prompt))
    for token_id in [*prompt, 9_998, 9_999, *prompt[-5:], 9_998]:
        context += [token_id]
        guess = index.guess(context, 1)
    assert guess and guess.token_ids == (9_999,)


def test_a_match_may_begin_in_the_prompt_and_end_in_the_output() -> None:
    assert guess_after([9, 1, 2], [3, 4, 8, 1, 2, 3], most=2) == Guess((4, 8), 3, (1.0, 1.0))


def test_outputs_of_a_request_share_the_prompt_and_nothing_else() -> None:
    prompt = packed([1, 2, 3, 4, 5])
    shared = IndexedText(built_suffixes(), prompt)
    one, other = SuffixIndex(shared), SuffixIndex(shared)
    assert shared.token_ids is prompt
    assert one.guess([1, 2, 3, 4, 5, 7, 8, 9, 7, 8], 1) == Guess((9,), 2, (1.0,))
    assert other.guess([1, 2, 3, 4, 5, 7, 8], 1) is None


@pytest.mark.parametrize("prompt", [[], [1], [1, 2, 3]])
def test_there_is_no_guess_where_nothing_comes_again(prompt: list[int]) -> None:
    assert guess_after(prompt, [4]) is None
    assert guess_after(prompt) is None


def test_a_guess_of_no_tokens_is_none() -> None:
    assert guess_after([1, 2, 3], [1, 2], most=0) is None


@given(ANY_TOKENS, ANY_TOKENS, st.integers(-1, 2**40))
def test_any_numbers_and_any_count_are_taken(prompt: list[int], output: list[int], most: int) -> None:
    guess = guess_after(prompt, output, most=most)
    assert (guess is None) == (most < 1 or not output + prompt or (output or prompt)[-1] not in (prompt + output)[:-1])
    if guess:
        assert len(guess.token_ids) <= most


def test_a_guess_may_have_as_many_tokens_as_there_are_drafts() -> None:
    guess = guess_after(list(range(100)), [3], most=1000)
    assert guess == Guess(tuple(range(4, 4 + MAX_DRAFT_COUNT)), 1, (1.0,) * MAX_DRAFT_COUNT)


def test_an_indexed_prompt_cannot_move() -> None:
    prompt = packed([1, 2, 3])
    index = IndexedText(built_suffixes(), prompt)
    with pytest.raises(BufferError):
        prompt.append(4)
    assert index.find([1, 2]) == [(2, 2)]
