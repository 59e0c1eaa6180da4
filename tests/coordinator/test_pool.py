"""The pool: places, order, and the time a generation starts to wait."""

from coordinator.requests.generation import Generation, Request
from coordinator.requests.stream import UNREAD_TOKENS
from coordinator.rounds.pool import GenerationPool
from paceline.types import OutputPiece, OutputToken
from tests.generations import generation_of


def generations(count: int) -> list[Generation]:
    requests = [Request(arrival=index, submitted_s=10.0) for index in range(count)]
    return [generation_of(name=str(one.arrival), request=one) for one in requests]


def test_a_sequence_waits_for_its_group_since_it_went_live_or_came_back() -> None:
    now_s = [10.0]
    pool = GenerationPool(1, clock=lambda: now_s[0])
    first, second = generations(2)
    pool.adopt([first, second])
    assert first.ready_since_s == 10

    now_s[0] = 12.0
    assert pool.claim([first]) == [2.0]
    now_s[0] = 15.0
    pool.settle([first])
    assert first.ready_since_s == 15
    now_s[0] = 16.0
    assert pool.claim([first]) == [1.0]
    assert first.first_grouped_s == 12
    pool.settle([first])

    now_s[0] = 20.0
    first.ended = True
    pool.retire([first])
    assert second.ready_since_s == 20


def test_a_scarce_cache_takes_in_one_at_a_time_beside_others_and_any_number_where_there_are_none() -> None:
    """After one shortage an idle target counted as one place for ever, so that requests of several were refused."""
    pool = GenerationPool(8)
    first, *_ = generations(1)
    pool.adopt([first])
    pool.claim([first])
    pool.ran_short(0)
    pool.settle([first])
    assert pool.free_count == 1
    first.ended = True
    pool.retire([first])
    assert pool.free_count == 8


def test_time_in_the_queue_is_told_until_the_next_round_is_over() -> None:
    now_s = [10.0]
    pool = GenerationPool(2, clock=lambda: now_s[0])
    first, second, third = generations(3)
    pool.adopt([first, second, third])
    now_s[0] = 13.0
    pool.claim([first])
    first.ended = True
    pool.settle([first])
    assert (second.queued_s, third.queued_s) == (0, 3)

    pool.claim([third])
    pool.settle([third])
    assert third.queued_s == 0

    assert pool.victim() is third
    assert pool.pause(third)
    now_s[0] = 20.0
    second.ended = True
    pool.retire([second])
    pool.let_in()
    assert (third.queued_s, third.ready_since_s) == (7, 20)


def test_a_sequence_is_queued_from_its_submission_until_its_first_round() -> None:
    now_s = [10.0]
    pool = GenerationPool(2, clock=lambda: now_s[0])
    (one,) = generations(1)
    pool.adopt([one])
    for began_s in (12.5, 20.0):
        now_s[0] = began_s
        pool.claim([one])
        pool.settle([one])
        assert one.until_first_round_s == 2.5
    one.commit([5], accepted_count=0, drafted_count=0, source=None)
    assert one.usage.queued_s == 2.5


def test_what_failed_while_it_is_not_read_is_handed_over() -> None:
    pool = GenerationPool(1)
    (unread,) = generations(1)
    pool.adopt([unread])
    pool.claim([unread])
    piece = OutputPiece((OutputToken(5, "a", accepted=False),) * (UNREAD_TOKENS + 1), None, 0)
    unread.request.stream.put(piece)
    pool.settle([unread])
    assert pool.unread_count == 1
    pool.hand_over(unread)
    assert pool.generations == []


def test_a_sequence_gets_no_place_while_it_is_cut() -> None:
    pool = GenerationPool(2)
    first, second = generations(2)
    pool.adopt([first, second])
    pool.pause(second)
    first.ended = True
    assert pool.retire([first]) == [first]
    assert pool.window() == []
    assert pool.let_in() == []
    assert pool.window() == [second]


def test_one_that_is_to_be_cut_after_its_round_begins_no_other_before() -> None:
    """Of three lanes two took it in turn: whenever the third looked it was in a round, and no row got room."""
    pool = GenerationPool(2)
    first, second = generations(2)
    pool.adopt([first, second])
    pool.claim([second])
    pool.hold_back(second)
    pool.settle([second])
    assert pool.window() == [first]
    assert pool.let_in() == []
    assert pool.window() == [first, second]


def test_one_that_ends_while_it_is_cut_leaves_afterwards() -> None:
    pool = GenerationPool(1)
    (only,) = generations(1)
    pool.adopt([only])
    pool.pause(only)
    only.ended = True
    assert pool.retire([only]) == []
    assert pool.let_in() == [only]
    assert pool.generations == []


def test_one_that_is_paused_waits_in_its_place() -> None:
    pool = GenerationPool(2)
    first, second, third = generations(3)
    pool.adopt([second, third, first])
    pool.pause(first)
    pool.pause(second)
    assert pool.generations == [first, second, third]
