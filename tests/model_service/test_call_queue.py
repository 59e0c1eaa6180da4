"""Calls that wait for the model: who is served together, in which order, and with what share."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from paceline.model_service.call_queue import CallQueue, TurnBound
from paceline.scope import Caller

BOUND = TurnBound(row_count=8, token_count=100)


@dataclass(eq=False)
class Item:
    caller: Caller
    token_count: int = 10
    row_count: int = 1
    sequence_ids: frozenset[str] = field(default_factory=frozenset)


def caller(name: str, weight: float = 1.0) -> Caller:
    return Caller(name, weight=weight)


def queue_of(items: Sequence[Item]) -> CallQueue[Item]:
    queue = CallQueue[Item](BOUND)
    for item in items:
        queue.add(item)
    return queue


def turns(queue: CallQueue[Item]) -> list[list[Item]]:
    found = []
    while turn := queue.take():
        found.append(turn)
    return found


ITEMS = st.builds(
    Item,
    st.sampled_from("abcd").map(caller),
    st.integers(1, 120),
    st.integers(0, 10),
    st.frozensets(st.sampled_from("xyz"), max_size=1),
)


@given(st.lists(ITEMS, max_size=30))
def test_all_is_done_once_in_each_callers_order_and_within_the_bound(items: list[Item]) -> None:
    done = turns(queue_of(items))
    for name in "abcd":
        assert [one for turn in done for one in turn if one.caller.name == name] == [
            one for one in items if one.caller.name == name
        ]
    for turn in done:
        if len(turn) > 1:
            assert len({one.caller.name for one in turn}) == len(turn)
        if len(turn) > 1 and any(one.row_count for one in turn):
            assert all(one.row_count for one in turn), "other work is done apart"
            assert sum(one.row_count for one in turn) <= BOUND.row_count
            assert sum(one.token_count for one in turn) <= BOUND.token_count
            named = Counter(name for one in turn for name in one.sequence_ids)
            assert not named or max(named.values()) == 1


def test_the_calls_of_all_callers_that_fit_share_a_turn() -> None:
    items = [Item(caller(name)) for name in "abcdab"]
    assert turns(queue_of(items)) == [items[:4], items[4:]]


def test_other_work_comes_first_and_after_its_callers_own_calls() -> None:
    call, release, other = Item(caller("a")), Item(caller("a"), row_count=0), Item(caller("b"))
    assert turns(queue_of([call, release, other])) == [[call, other], [release]]
    assert turns(queue_of([other, release, call])) == [[release], [other, call]]


def test_a_callers_other_work_does_not_keep_calls_waiting() -> None:
    releases, call = [Item(caller("a"), row_count=0) for _ in range(3)], Item(caller("b"))
    assert turns(queue_of([*releases, call])) == [[releases[0]], [call], [releases[1]], [releases[2]]]


def test_a_call_that_is_taken_out_is_not_done() -> None:
    gone, left, unknown = Item(caller("a")), Item(caller("b")), Item(caller("c"))
    queue = queue_of([gone, left])
    queue.remove(gone)
    queue.remove(unknown)
    assert turns(queue) == [[left]]
    queue.remove(left)
    assert not queue.waiting()


@given(st.lists(st.tuples(st.integers(51, 120), st.sampled_from([1.0, 2.0, 3.0])), min_size=2, max_size=4))
def test_callers_that_always_wait_share_the_tokens_by_their_weights(kinds: list[tuple[int, float]]) -> None:
    """Their calls fit into no turn together. For each unit of weight they have the same, but for two calls."""
    callers = [caller(str(number), weight) for number, (_, weight) in enumerate(kinds)]
    queue = queue_of([Item(one, size) for one, (size, _) in zip(callers, kinds, strict=True)])
    tokens = Counter[str]()
    for _ in range(100):
        (item,) = queue.take()
        tokens[item.caller.name] += item.token_count
        queue.add(Item(item.caller, item.token_count))
    shares = [tokens[one.name] / one.weight for one in callers]
    assert max(shares) - min(shares) <= 2 * max(size for size, _ in kinds)


def test_a_caller_that_comes_back_gets_nothing_for_its_absence() -> None:
    often, seldom = caller("often"), caller("seldom")
    queue = queue_of([Item(often, 60), Item(often, 60)])
    for _ in range(50):
        queue.take()
        queue.add(Item(often, 60))
    for _ in range(20):
        queue.add(Item(seldom, 60))
    served = [queue.take()[0].caller.name for _ in range(4)]
    assert Counter(served) == {"often": 2, "seldom": 2}


def test_a_caller_that_comes_back_to_others_who_contend_gets_as_much_as_each_of_them() -> None:
    seldom, busy = caller("seldom"), [caller("one"), caller("two")]
    queue = queue_of([Item(one, 60) for one in busy])
    served = Counter[str]()
    for turn in range(59):
        if turn == 50:
            served.clear()
            queue.add(Item(seldom, 60))
        (item,) = queue.take()
        served[item.caller.name] += 1
        queue.add(Item(item.caller, 60))
    assert sorted(served) == ["one", "seldom", "two"]
    assert max(served.values()) - min(served.values()) <= 2


def test_no_turn_names_a_sequence_twice() -> None:
    first, second, other = (Item(caller(name), sequence_ids=frozenset(own)) for name, own in ("ax", "bx", "cy"))
    assert turns(queue_of([first, second, other])) == [[first, other], [second]]


def test_large_calls_do_not_wait_for_ever_behind_small_ones() -> None:
    large = Item(caller("large"), 100)
    queue = queue_of([Item(caller(name), 40) for name in "ab"] + [large])
    waited = deque[list[Item]]()
    while not waited or large not in waited[-1]:
        waited.append(queue.take())
        for item in waited[-1]:
            queue.add(Item(item.caller, item.token_count))
    assert len(waited) <= 2
