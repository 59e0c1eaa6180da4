"""Round times by draft count: measured where there is much data, shared where there is little."""

import pytest
from coordinator.rounds.round_times import KEPT, RoundTimes
from hypothesis import given
from hypothesis import strategies as st

ROUNDS = st.lists(st.tuples(st.integers(0, 12), st.floats(0.001, 1.0)), min_size=1, max_size=60)


@given(ROUNDS)
def test_more_drafts_never_take_less_whatever_few_rounds_say(rounds: list[tuple[int, float]]) -> None:
    times = RoundTimes()
    for count, cycle_s in rounds:
        times.add(count, cycle_s)
    took = times.predict(12)[1:]
    assert took == sorted(took)


def test_counts_out_of_order_are_taken_for_alike_by_their_weight() -> None:
    times = RoundTimes()
    for _ in range(int(KEPT)):
        times.add(4, 0.05)
    for _ in range(8):
        times.add(8, 0.03)  # measured in a calm moment
    took = times.predict(8)
    assert took[8] == pytest.approx(took[4])
    assert took[4] == pytest.approx(1, rel=0.1)
