"""Committed tokens read like a list, however many belong to the prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.requests.committed_tokens import CommittedTokens, packed

PLACES = st.none() | st.integers(-12, 12)


@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
    PLACES,
    PLACES,
)
def test_they_read_like_a_list(prompt: list[int], pieces: list[list[int]], start: int | None, stop: int | None) -> None:
    tokens, whole = CommittedTokens(packed(prompt)), list(prompt)
    for piece in pieces:
        tokens += piece
        whole += piece
    assert (len(tokens), tokens[:], tokens[start:stop]) == (len(whole), whole, whole[start:stop])
    for place in range(-len(whole), len(whole)):
        assert tokens[place] == whole[place]
    with pytest.raises(IndexError):
        tokens[len(whole)]


def test_a_long_prompt_is_packed_in_chunks_and_whole() -> None:
    assert packed(iter(range(10_000))).tolist() == list(range(10_000))
