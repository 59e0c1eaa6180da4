"""The end of calls, told by the pauses between them."""

import pytest

from draft_service.pauses import PATIENCE, Pauses
from tests.fakes.fake_time import FakeTime

PAUSE_S = 0.02


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


def after(time: FakeTime, pauses_s: list[float]) -> Pauses:
    """Return what is known when a call was answered after each pause."""
    pauses = Pauses(time.clock)
    pauses.answered()
    for pause_s in pauses_s:
        time.now_s += pause_s
        pauses.asked()
        time.now_s += 0.1
        pauses.answered()
    return pauses


def test_a_usual_pause_is_no_end_and_a_much_longer_one_is(time: FakeTime) -> None:
    pauses = after(time, [PAUSE_S] * 5)
    time.now_s += 0.9 * PATIENCE * PAUSE_S
    assert not pauses.is_over
    time.now_s += 0.2 * PATIENCE * PAUSE_S
    assert pauses.is_over


def test_nothing_is_over_before_a_pause_is_known(time: FakeTime) -> None:
    assert not Pauses(time.clock).is_over
    pauses = after(time, [])
    time.now_s += 1000
    assert not pauses.is_over


def test_an_idle_hour_is_forgotten_after_a_few_calls(time: FakeTime) -> None:
    pauses = after(time, [PAUSE_S] * 5 + [3600] + [PAUSE_S] * 12)
    time.now_s += 1.1 * PATIENCE * PAUSE_S
    assert pauses.is_over


def test_longer_pauses_become_usual(time: FakeTime) -> None:
    pauses = after(time, [PAUSE_S] * 5 + [20 * PAUSE_S] * 5)
    time.now_s += 20 * PAUSE_S
    assert not pauses.is_over
