"""Suffixes shared by outputs: what one contained is guessed in another, the oldest are forgotten.

A coordinator shares them where its operator turned it on.
"""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.drafting.guessers import Guessers
from coordinator.drafting.shared_suffixes import SharedSuffixes
from coordinator.requests.guess import Guess
from paceline.types import DraftingOptions, DraftSource
from tests.coordinators import dispatching
from tests.fakes.dispatches import output as output_of
from tests.fakes.dispatches import submit, whole
from tests.fakes.model_services import FakeVerifier
from tests.tools import built_suffixes

PROMPT, LENGTH = (8, 8), 40
OUTPUTS = st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=12)


@given(OUTPUTS, st.lists(st.integers(0, 3), max_size=6))
def test_every_guess_stood_in_one_output(outputs: list[list[int]], context: list[int]) -> None:
    shared = SharedSuffixes(built_suffixes(), 80)
    for output in outputs:
        shared.add(output)
    if guess := shared.guess(context, 4):
        found = [context[-1], *guess.token_ids]
        runs = [output[start : start + len(found)] for output in outputs for start in range(len(output))]
        assert found in runs


def test_most_outputs_decide_and_the_share_says_how_many() -> None:
    shared = SharedSuffixes(built_suffixes(), 1000)
    for output in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]):
        shared.add(output)
    assert shared.guess([9, 1, 2], 2) == Guess((3, 4), 2, (1.0, 2 / 3))


def test_a_guess_ends_with_its_output() -> None:
    shared = SharedSuffixes(built_suffixes(), 1000)
    shared.add([1, 2, 3])
    shared.add([4, 5, 6])
    assert shared.guess([1, 2], 5) == Guess((3,), 2, (1.0,))
    assert shared.guess([2, 3], 5) is None


def test_the_oldest_outputs_leave_and_the_latest_stay() -> None:
    shared, outputs = (
        SharedSuffixes(built_suffixes(), 400),
        [[100 * number + place for place in range(20)] for number in range(60)],
    )
    for output in outputs:
        shared.add(output)
    known = [output for output in outputs if shared.guess(output[:2], 1)]
    assert known == outputs[-len(known) :]
    assert 200 <= sum(map(len, known)) <= 400


def test_of_an_output_longer_than_there_is_room_for_the_end_is_kept() -> None:
    shared = SharedSuffixes(built_suffixes(), 40)
    shared.add(list(range(100)))
    assert shared.guess([97, 98], 3) == Guess((99,), 2, (1.0,))
    assert shared.guess([0, 1], 3) is None


def test_a_limit_too_small_for_any_output_is_refused() -> None:
    with pytest.raises(ValueError, match="token_limit is 3; give at least"):
        SharedSuffixes(built_suffixes(), 3)


@pytest.mark.parametrize(("own", "expected"), [([3, 9, 1, 2, 3], 4), ([1, 2, 3, 9, 1, 2, 3], 9), ([8, 1, 2, 3], 4)])
def test_the_longer_match_decides_and_of_equal_ones_that_of_the_own_text(own: list[int], expected: int) -> None:
    shared = SharedSuffixes(built_suffixes(), 1000)
    shared.add([1, 2, 3, 4])
    make = Guessers(built_suffixes(), shared).of_request(array("i", own), DraftingOptions(), array("i"))
    guess = make()[DraftSource.SUFFIX].guess(own, 1)
    assert guess and guess.token_ids == (expected,)


@pytest.mark.parametrize("draft_count", [4, "auto"])
@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_request_is_drafted_for_from_the_outputs_of_others_only_where_that_is_turned_on(
    is_shared: bool, draft_count: int | str
) -> None:
    verifier = FakeVerifier()
    async with dispatching([], [verifier], draft_count=draft_count, shared_suffixes=is_shared) as running:
        for _ in range(2):
            verifier.calls.clear()
            assert await output_of(submit(running, PROMPT, LENGTH)) == whole(PROMPT, LENGTH)
    assert (len(verifier.calls) < LENGTH / 2) is is_shared


async def test_of_a_request_the_output_is_shared_and_never_the_prompt() -> None:
    verifier = FakeVerifier()
    async with dispatching([], [verifier], draft_count=4, shared_suffixes=True) as running:
        first = await output_of(submit(running, (30, 31, 32, 33), LENGTH))
        for beginning, is_drafted in (((30, 31), False), (tuple(first[10:12]), True)):
            verifier.calls.clear()
            await output_of(submit(running, (9, *beginning), LENGTH))
            drafted = verifier.calls[0][0].draft_token_ids
            assert (drafted == tuple(first[12:16])) is is_drafted
            assert 32 not in drafted
