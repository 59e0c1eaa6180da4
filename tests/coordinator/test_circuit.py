"""The circuit: opening, trial calls, and pauses that grow and reset."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.replicas.circuit import (
    FAILURES_TO_OPEN,
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    SUCCESSES_TO_FORGET,
    Circuit,
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
    for _ in range(SUCCESSES_TO_FORGET):
        circuit.succeeded()
    for _ in range(FAILURES_TO_OPEN):
        circuit.failed()
    clock.now_s += FIRST_PAUSE_S
    assert circuit.allows()


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
