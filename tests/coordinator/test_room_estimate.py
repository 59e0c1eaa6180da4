"""The room that is foreseen in a target's cache: how much there is, and what a generation may come to take of it."""

import pytest

from coordinator.requests.generation import Generation
from coordinator.rounds.room_estimate import QUIET, RISE, RoomEstimate
from tests.generations import generation_of


def generation(prompt_count: int, most: int, output_count: int = 0) -> Generation:
    """Return a generation with so many tokens of output so far, all of whose tokens are cached."""
    found = generation_of((5,) * prompt_count, most)
    found.commit([6] * output_count, accepted_count=0, drafted_count=0, source=None)
    found.target_cached_length = prompt_count + output_count
    return found


def room_of(token_count: int) -> RoomEstimate:
    """Return the room of a cache that ran short with so many tokens cached."""
    room = RoomEstimate()
    room.ran_short([generation(token_count, 1)], 0)
    return room


def test_nothing_is_held_back_before_the_target_was_short_of_room() -> None:
    room = RoomEstimate()
    assert not room.is_scarce
    assert room.fits(generation(30, 9), [generation(30, 9)] * 9, [])


@pytest.mark.parametrize(("free_count", "fits"), [(20, True), (19, False), (-5, False)])
def test_the_room_is_what_was_cached_and_free_when_a_row_was_refused(free_count: int, fits: bool) -> None:
    room, live = RoomEstimate(), generation(10, 5)
    room.ran_short([live], free_count)
    assert room.is_scarce
    assert room.fits(generation(10, 5), [live], []) is fits, "two of 15 tokens each"


def test_one_that_ends_first_leaves_its_room_to_the_others() -> None:
    """Both have 2 tokens more when the short one ends, and the long one alone comes to 20."""
    short, long = generation(10, 2), generation(10, 10)
    assert room_of(24).fits(short, [long], [])
    assert not room_of(23).fits(short, [long], [])


def test_what_paused_generations_have_cached_is_no_room() -> None:
    candidate, paused = generation(10, 5), generation(8, 5)
    assert room_of(23).fits(candidate, [], [paused])
    assert not room_of(22).fits(candidate, [], [paused])
    assert room_of(15).fits(candidate, [], [candidate]), "it is one of them until it goes on"


def test_an_output_is_expected_to_become_as_long_as_the_longer_ones_of_late() -> None:
    candidate = generation(10, 100, output_count=4)
    for token_count, fits in ((20, True), (19, False)):
        room = room_of(token_count)
        for output_count in (2, 9, 11):
            room._lengths.ended(generation(1, 20, output_count))
        assert room.fits(candidate, [], []) is fits, "14 tokens now, and 10 of output in the end"


def test_the_room_rises_with_each_output_that_ends_for_others_may_have_freed_some() -> None:
    room, candidate = room_of(100), generation(90, 11)
    assert not room.fits(candidate, [], [])
    room.ended(generation(1, 100, 50))
    assert RISE * 100 >= 101
    assert room.fits(generation(90, 11), [], [])


def test_a_room_that_was_measured_while_others_held_the_cache_holds_nobody_back_for_long() -> None:
    """It rose by one in a hundred: a coordinator served one generation at a time for hundreds of outputs."""
    room, live = room_of(1), [generation(200, 50) for _ in range(15)]
    for _ in range(QUIET - 1):
        room.ended(generation(1, 50, 50))
    assert not room.fits(generation(200, 50), live[:1], [])
    room.ran_short([generation(1, 1)], 0)
    for _ in range(QUIET - 1):
        room.ended(generation(1, 50, 50))
    assert room.is_scarce, "the last shortage counts"
    room.ended(generation(1, 50, 50))
    assert not room.is_scarce and room.fits(generation(200, 50), live, [])
