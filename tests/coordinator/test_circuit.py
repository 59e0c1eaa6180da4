"""The circuit: opening, trial calls, and pauses that grow and reset."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.replicas.circuit import (
    FAILURES_TO_OPEN,
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    RIGHT_FOR_A_WRONG,
    SUCCESSES_TO_FORGET,
    WELL_TO_FORGET_S,
    Circuit,
    Failure,
)
from paceline.types import CircuitState
from tests.fakes.model_services import Clock


def opened(clock: Clock) -> Circuit:
    circuit = Circuit(clock, jitter=lambda: 1.0)
    for _ in range(FAILURES_TO_OPEN):
        assert circuit.allows()
        circuit.failed()
    return circuit


def test_one_failure_is_forgiven_and_two_in_a_row_open_it() -> None:
    circuit = Circuit(Clock(), jitter=lambda: 1.0)
    circuit.failed()
    circuit.succeeded()
    circuit.failed()
    assert circuit.allows()
    circuit.failed()
    assert circuit.state is CircuitState.OPEN
    assert not circuit.allows()


def test_after_the_pause_one_call_at_a_time_is_let_through() -> None:
    clock = Clock()
    circuit = opened(clock)
    clock.advance(FIRST_PAUSE_S)
    assert circuit.allows()
    assert circuit.state is CircuitState.HALF_OPEN
    assert not circuit.allows()
    circuit.succeeded()
    assert circuit.allows() and circuit.allows()


def test_a_trial_that_was_given_up_lets_the_next_one_through() -> None:
    clock = Clock()
    circuit = opened(clock)
    clock.advance(FIRST_PAUSE_S)
    assert circuit.allows()
    circuit.gave_up()
    assert circuit.allows()


def test_pauses_double_up_to_the_longest_and_are_forgotten_after_enough_successes() -> None:
    clock = Clock()
    circuit = opened(clock)
    pauses = []
    for _ in range(9):
        began = clock.now_s
        while not circuit.allows():
            clock.now_s += FIRST_PAUSE_S
        pauses.append(clock.now_s - began)
        circuit.failed()
    assert pauses[:4] == [FIRST_PAUSE_S * 2**n for n in range(4)]
    assert max(pauses) == MAX_PAUSE_S

    clock.now_s += MAX_PAUSE_S
    assert circuit.allows()
    clock.now_s += WELL_TO_FORGET_S
    for _ in range(SUCCESSES_TO_FORGET):
        circuit.succeeded()
    for _ in range(FAILURES_TO_OPEN):
        circuit.failed()
    clock.now_s += FIRST_PAUSE_S
    assert circuit.allows()


@pytest.mark.parametrize("right_count", range(RIGHT_FOR_A_WRONG))
def test_wrong_answers_open_it_though_right_ones_come_between(right_count: int) -> None:
    """Every second answer could be garbage, and the service was called as before."""
    circuit = Circuit(Clock(), jitter=lambda: 1.0)
    for _ in range(10 * RIGHT_FOR_A_WRONG):
        for _ in range(right_count):
            circuit.succeeded()
        circuit.failed(Failure.WRONG)
    assert circuit.state is CircuitState.OPEN


def test_rare_wrong_answers_are_forgiven() -> None:
    circuit = Circuit(Clock(), jitter=lambda: 1.0)
    for _ in range(100):
        circuit.failed(Failure.WRONG)
        for _ in range(RIGHT_FOR_A_WRONG):
            circuit.succeeded()
    assert circuit.state is CircuitState.CLOSED


def test_a_service_whose_every_second_answer_is_wrong_is_called_ever_more_rarely() -> None:
    """Trials happen to be answered well, so pauses that only failed trials make longer would stay short."""
    clock = Clock()
    circuit = Circuit(clock, jitter=lambda: 1.0)
    wrong_count, is_right, hours = 0, False, 1
    while clock() < 100.0 + 3600 * hours:
        if circuit.allows():
            circuit.succeeded() if is_right else circuit.failed(Failure.WRONG)
            wrong_count += not is_right
            is_right = not is_right
        clock.advance(0.1)
    assert wrong_count < 10 + 3600 * hours / MAX_PAUSE_S


def test_a_service_that_hangs_now_and_then_between_good_calls_is_tried_ever_more_rarely() -> None:
    """A network that loses large messages alone: small calls went well at once, so the pauses stayed short."""
    clock = Clock()
    circuit = Circuit(clock, jitter=lambda: 1.0)
    hung_count, good_count = 0, 0
    while clock() < 100.0 + 3600.0:
        if not circuit.allows():
            clock.advance(0.1)
        elif good_count < 2 * SUCCESSES_TO_FORGET:
            clock.advance(0.1)
            circuit.succeeded()
            good_count += 1
        else:
            clock.advance(3.0)
            circuit.failed(Failure.HUNG)
            hung_count, good_count = hung_count + 1, 0
    assert hung_count < 10 + 3600.0 / MAX_PAUSE_S


def test_calls_under_way_when_it_opens_do_not_close_it() -> None:
    clock = Clock()
    circuit = opened(clock)
    circuit.succeeded()
    assert not circuit.allows()
    clock.advance(FIRST_PAUSE_S)
    assert circuit.allows()
    circuit.succeeded()
    assert circuit.state is CircuitState.CLOSED


@given(st.lists(st.sampled_from(["ask", "succeed", "fail", "give up", "wait"]), max_size=60))
def test_it_never_stays_closed_to_a_service_that_works(steps: list[str]) -> None:
    clock = Clock()
    circuit = Circuit(clock, jitter=lambda: 1.0)
    under_way = 0
    for step in steps:
        if step == "ask":
            under_way += circuit.allows()
        elif step == "wait":
            clock.now_s += 1
        elif under_way:
            under_way -= 1
            {"succeed": circuit.succeeded, "fail": circuit.failed, "give up": circuit.gave_up}[step]()
    for _ in range(under_way):
        circuit.gave_up()
    clock.now_s += MAX_PAUSE_S
    assert circuit.allows()
    circuit.succeeded()
    assert circuit.state is CircuitState.CLOSED
