"""Whether a round waits for more drafts: by the tokens that they bring, and by the time that they take."""

import pytest

from coordinator.drafting.patience import Patience
from paceline.types import ProposeRow

ROW = ProposeRow("a", 4, (1,), 9)
KNOWN = 4
"""Drafts with which a round gives half the tokens of one with all. So it waits for no longer than a round takes."""


def patience_after(call_s: float, elsewhere_s: float, row: ProposeRow = ROW) -> Patience:
    """Return what knows of one call, and of one round that took so long beside its drafts."""
    patience = Patience(lambda draft_count: 1.0 + draft_count)
    patience.answered([row], 100.0)
    patience.asked([row], 100.0 + elsewhere_s)
    patience.called(call_s)
    return patience


@pytest.mark.parametrize(("call_s", "elsewhere_s", "is_enough"), [(1.0, 10.0, False), (10.0, 1.0, True)])
def test_a_long_round_waits_for_a_short_call_and_a_short_round_for_no_long_one(
    call_s: float, elsewhere_s: float, is_enough: bool
) -> None:
    assert patience_after(call_s, elsewhere_s).is_enough([ROW], [KNOWN]) is is_enough


def test_a_call_that_is_nearly_done_is_waited_for() -> None:
    patience = patience_after(call_s=10.0, elsewhere_s=4.0)
    assert patience.is_enough([ROW], [KNOWN], waited_s=5.5)
    assert not patience.is_enough([ROW], [KNOWN], waited_s=6.5)


def test_rows_share_what_is_known() -> None:
    other = ProposeRow("b", 4, (1,), 9)
    patience = patience_after(call_s=9.0, elsewhere_s=10.0)
    assert patience.is_enough([ROW, other], [9, 0])
    assert not patience.is_enough([ROW, other], [8, 0])


def test_with_all_drafts_a_round_never_waits_and_with_few_always() -> None:
    assert patience_after(call_s=1.0, elsewhere_s=1000.0).is_enough([ROW], [9])
    assert not patience_after(call_s=1000.0, elsewhere_s=1.0).is_enough([ROW], [3])


def test_before_both_times_are_known_a_round_waits_for_all_drafts() -> None:
    begins, unknown = ProposeRow("a", 0, (1,), 9), Patience(float)
    unknown.called(1000.0)
    for patience in (unknown, patience_after(call_s=1000.0, elsewhere_s=1.0, row=begins)):
        assert not patience.is_enough([ROW], [8])
        assert patience.is_enough([ROW], [9])


def test_the_time_of_a_sequence_that_was_freed_is_no_rounds() -> None:
    patience = Patience(float)
    patience.called(1000.0)
    patience.answered([ROW], 0.0)
    patience.forget(["a", "unknown"])
    patience.asked([ROW], 1.0)
    assert not patience.is_enough([ROW], [8])
