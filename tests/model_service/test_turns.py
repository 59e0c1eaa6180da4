"""Turns of threads at the model: order, and who may work while another waits."""

from collections.abc import Callable
from threading import Event, Thread

import pytest

from paceline.model_service.turns import Turns

LONGEST_S = 30


class Waiting:
    """A call in a thread, which waits for other ranks until it is told to go on."""

    def __init__(self, turns: Turns, names: frozenset[str], said: list[str]) -> None:
        self.waits, self.go_on = Event(), Event()

        def work() -> None:
            with turns.taken(turns.queued(names)):
                with turns.let_go():
                    self.waits.set()
                    assert self.go_on.wait(LONGEST_S)
                said.append(min(names))

        self.thread = Thread(target=work)
        self.thread.start()
        assert self.waits.wait(LONGEST_S)

    def end(self) -> None:
        self.go_on.set()
        self.thread.join(LONGEST_S)


def begin(work: Callable[[], None]) -> Thread:
    thread = Thread(target=work)
    thread.start()
    return thread


def test_a_call_about_other_sequences_works_while_one_waits() -> None:
    turns, said = Turns(), list[str]()
    first = Waiting(turns, frozenset("a"), said)
    with turns.taken(turns.queued(frozenset("b"))):
        said.append("b")
    first.end()
    assert said == ["b", "a"]


@pytest.mark.parametrize("names", [frozenset("ab"), None], ids=["the same sequence", "all sequences"])
def test_a_call_about_the_same_sequence_and_work_that_must_be_alone_wait_for_the_end(
    names: frozenset[str] | None,
) -> None:
    turns, said = Turns(), list[str]()
    first = Waiting(turns, frozenset("a"), said)

    def work() -> None:
        with turns.taken(turns.queued(names)):
            said.append("second")

    second = begin(work)
    second.join(0.05)
    first.end()
    second.join(LONGEST_S)
    assert said == ["a", "second"]


def test_no_call_overtakes_one_that_must_wait() -> None:
    turns, said = Turns(), list[str]()
    first = Waiting(turns, frozenset("a"), said)

    def alone() -> None:
        with turns.taken(turns.queued()):
            said.append("alone")

    def other() -> None:
        with turns.taken(turns.queued(frozenset("b"))):
            said.append("b")

    second = begin(alone)
    second.join(0.05)
    third = begin(other)
    third.join(0.05)
    first.end()
    second.join(LONGEST_S)
    third.join(LONGEST_S)
    assert said == ["a", "alone", "b"]


def test_calls_go_on_in_the_order_in_which_they_let_go() -> None:
    turns, said = Turns(), list[str]()
    first, second = (Waiting(turns, frozenset(name), said) for name in "ab")
    second.go_on.set()
    second.thread.join(0.05)
    assert not said
    first.end()
    second.end()
    assert said == ["a", "b"]


def test_failed_work_ends_its_turn() -> None:
    turns = Turns()
    with pytest.raises(ValueError), turns.taken(turns.queued(frozenset("a"))), turns.let_go():
        raise ValueError
    with turns.taken(turns.queued()):
        pass
