"""Stop strings in text that comes in pieces."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.requests.stop_strings import StopStringMatcher, StopStrings


@given(
    st.lists(st.text(alphabet="abc", max_size=3)),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_shown_text_ends_before_the_first_stop_string_however_it_is_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStringMatcher(StopStrings(stops))
    pushed, shown, stopped = "", "", False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        pushed += piece
        shown += text
        if stopped:
            break
    shown += "" if stopped else matcher.drain()
    found = [at for stop in stops if (at := pushed.find(stop)) >= 0]
    assert (shown, stopped) == (pushed[: min(found, default=len(pushed))], bool(found))


class NaiveMatcher:
    """Compares each stop string with all held text at each piece."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        self._held += text
        if found := [start for stop in self._stops if (start := self._held.find(stop)) >= 0]:
            return self._held[: min(found)], True
        beginnings = [stop[:length] for stop in self._stops for length in range(1, len(stop))]
        held_count = max((len(one) for one in beginnings if self._held.endswith(one)), default=0)
        shown = self._held[: len(self._held) - held_count]
        self._held = self._held[len(shown) :]
        return shown, False

    def drain(self) -> str:
        return self._held


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=7), max_size=5),
)
@example(["abcd"], ["abcd", "c"])
@example(["ab", "cd"], ["abcd", "c"])
@example(["aabaabaab", "b"], ["aabaabaabb", "baabb"])
@example(["a"] * 9, ["a" * 12, "aab"])
def test_each_piece_is_answered_as_by_a_search_of_all_that_is_held(pieces: list[str], stops: list[str]) -> None:
    matcher, naive = StopStringMatcher(StopStrings(stops)), NaiveMatcher(stops)
    for piece in pieces:
        answer = matcher.push(piece)
        assert answer == naive.push(piece)
        if answer[1]:
            return
    assert matcher.drain() == naive.drain()


class CountedSteps(dict[tuple[int, str], int]):
    count = 0

    def get(self, *key: Any) -> Any:
        self.count += 1
        return super().get(*key)


@pytest.mark.review
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["a" * 1000 + "b"], "a" * 3000),
        (["a" * 1000 + "b"], ("a" * 1000 + "c") * 3),
        (["ab" * 50 + str(number) for number in range(10)], "ab" * 1500),
    ],
)
def test_steps_are_at_most_twice_the_characters_of_the_text(stops: list[str], text: str) -> None:
    """review C5: the end of the text was compared with each beginning of each stop string, at each token."""
    automaton = StopStrings(stops)
    automaton._steps = steps = CountedSteps(automaton._steps)
    matcher = StopStringMatcher(automaton)
    assert "".join(matcher.push(one)[0] for one in text) + matcher.drain() == text
    assert steps.count <= 2 * len(text)
