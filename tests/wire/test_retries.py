"""The length of a survived outage, and the pauses between calls, on fake time."""

import asyncio

import pytest

from paceline.client import NO_RETRIES, Retry, RetryPolicy
from paceline.errors import CallTimedOut, Overloaded, PacelineError, PeerUnavailable
from paceline.retries import DEFAULT_RETRIES, Outage
from tests.fakes.fake_time import FakeTime

GONE = PeerUnavailable("connection refused")
FULL = Overloaded("full", retry_after_s=1.0)


class Caller:
    """Calls that fail with `error` until a given time."""

    def __init__(self, policy: RetryPolicy, *, ends_at_s: float | None = None) -> None:
        self.time = FakeTime()
        self.called_s: list[float] = []
        self.told: list[Retry] = []
        self.outage = Outage(
            policy, ends_at_s=ends_at_s, clock=self.time.clock, sleep=self.time.sleep, on_retry=self.told.append
        )

    def call_until(self, answered_s: float, error: PacelineError = GONE) -> None:
        async def call() -> None:
            self.called_s.append(self.time.now_s)
            while self.time.now_s < answered_s:
                await self.outage.wait(error, "here:1")
                self.called_s.append(self.time.now_s)

        asyncio.run(self.time.run(call()))


@pytest.mark.review
def test_by_default_an_outage_of_two_minutes_is_survived_and_a_longer_one_is_raised() -> None:
    """Review C13: only five failures in a row, 3.0 s at most, were survived."""
    for _ in range(20):
        Caller(DEFAULT_RETRIES).call_until(60)
        Caller(DEFAULT_RETRIES).call_until(120)
        lasting = Caller(DEFAULT_RETRIES)
        with pytest.raises(PeerUnavailable, match="here:1 could not be used for 120 s: connection refused"):
            lasting.call_until(121)
        assert lasting.called_s[-1] == pytest.approx(120)


def test_an_outage_counts_from_its_first_failure_and_ends_when_something_comes() -> None:
    caller = Caller(RetryPolicy(10))
    for began_s in (0, 100, 109):
        caller.time.now_s = began_s
        caller.call_until(began_s + 8)
        caller.outage.over()
    with pytest.raises(PeerUnavailable):
        caller.call_until(caller.time.now_s + 11)


@pytest.mark.review
def test_pauses_are_all_chance_up_to_a_bound_that_doubles_to_a_few_seconds() -> None:
    """Review C13: pauses without jitter."""
    policy = RetryPolicy()
    for failures, longest_s in ((1, 0.2), (2, 0.4), (3, 0.8), (5, 3.0), (100_000, 3.0)):
        pauses_s = [policy.delay_s(failures) for _ in range(1000)]
        assert 0 <= min(pauses_s) < 0.1 * longest_s
        assert 0.9 * longest_s < max(pauses_s) <= longest_s


@pytest.mark.review
def test_a_full_coordinator_is_asked_for_as_long_as_it_is_full_never_too_early_and_not_by_all_at_once() -> None:
    """Review C13: all clients of a full coordinator came back after the same second."""
    caller = Caller(RetryPolicy(10))
    caller.call_until(1000, FULL)
    pauses_s = [retry.delay_s for retry in caller.told]
    assert min(pauses_s) >= FULL.retry_after_s
    assert max(pauses_s) - min(pauses_s) > 1
    assert all(retry.remaining_s is None for retry in caller.told)


def test_whoever_waits_is_told_who_failed_why_and_for_how_long_calls_go_on() -> None:
    caller = Caller(RetryPolicy(10))
    caller.call_until(5)
    assert {(retry.address, retry.error) for retry in caller.told} == {("here:1", GONE)}
    assert [retry.remaining_s for retry in caller.told] == [10 - at_s for at_s in caller.called_s[:-1]]
    assert [retry.delay_s for retry in caller.told] == pytest.approx(
        [later - sooner for sooner, later in zip(caller.called_s, caller.called_s[1:], strict=False)]
    )


def test_without_retries_the_first_failure_is_raised() -> None:
    for error in (GONE, FULL):
        caller = Caller(NO_RETRIES)
        with pytest.raises(type(error)):
            caller.call_until(1, error)
        assert not caller.told


def test_no_pause_outlasts_the_time_the_output_has() -> None:
    for error in (GONE, FULL):
        caller = Caller(RetryPolicy(), ends_at_s=5)
        with pytest.raises(CallTimedOut, match="did not end in time"):
            caller.call_until(6, error)
        assert caller.time.now_s < 5
