"""The pool: places, order, and since when a sequence waits."""

from coordinator.output import Output, StopRules
from coordinator.pool import SequencePool
from coordinator.sequence import Sequence
from coordinator.stream import Stream
from paceline.types import Usage


def sequences(count: int) -> list[Sequence]:
    rules = StopRules(max_new_tokens=9, end_token_ids=frozenset())
    return [Sequence(str(index), [1], Output(rules, None), 0, Usage(1), Stream()) for index in range(count)]


def test_a_sequence_waits_for_its_group_since_it_went_live_or_came_back() -> None:
    now_s = [10.0]
    pool = SequencePool(1, 5, clock=lambda: now_s[0])
    first, second = sequences(2)
    pool.submit([first, second])
    assert first.ready_since_s == 10

    now_s[0] = 12.0
    pool.claim([first])
    now_s[0] = 15.0
    pool.settle([first])
    assert first.ready_since_s == 15

    now_s[0] = 20.0
    first.ended = True
    pool.retire([first])
    assert second.ready_since_s == 20
    assert (first.submitted_s, second.submitted_s) == (10, 10)


def test_a_sequence_is_queued_from_its_submission_until_its_first_round() -> None:
    now_s = [10.0]
    pool = SequencePool(2, 5, clock=lambda: now_s[0])
    (one,) = sequences(1)
    pool.submit([one])
    for began_s in (12.5, 20.0):
        now_s[0] = began_s
        pool.claim([one])
        pool.settle([one])
        assert one.queued_s == 2.5
    one.commit([5], accepted_count=0, drafted_count=0)
    assert one.usage.queued_s == 2.5
