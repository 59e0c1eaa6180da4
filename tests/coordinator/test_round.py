"""One round over fake services: where its time went."""

from collections.abc import Sequence

import pytest

from coordinator.rounds.costs import RoundWork
from coordinator.rounds.round import RoundLimits, run_round
from coordinator.rounds.round_report import RoundReport
from coordinator.rounds.statistics import Statistics
from paceline.errors import CacheFull, InvalidRequest, PacelineError, PeerUnavailable
from paceline.types import CallTiming, HopTime, Proposal, ProposeRow, VerifyRow
from tests.coordinators import MODEL, asking
from tests.fakes.model_services import CHUNK_TOKENS, VOCABULARY_SIZE, Clock, FakeDrafter, FakeVerifier
from tests.generations import generation_of

LIMITS = RoundLimits(vocabulary_size=VOCABULARY_SIZE, prefill_chunk_tokens=CHUNK_TOKENS)


async def timed_round(drafter: FakeDrafter, verifier: FakeVerifier, clock: Clock) -> RoundReport:
    return await run_round(asking([generation_of()], [3]), {MODEL: drafter}, verifier, LIMITS, clock=clock)


@pytest.mark.parametrize("skill", [0.0, 1.0])
async def test_a_round_in_which_a_service_takes_in_what_it_missed_is_no_decoding_one(skill: float) -> None:
    generation, drafter, verifier = generation_of(), FakeDrafter(skill), FakeVerifier()
    counts = (3, 3, 3, 0, 0, 3, 3)
    rounds = [await run_round(asking([generation], [count]), {MODEL: drafter}, verifier, LIMITS) for count in counts]
    assert [one.is_decoding for one in rounds] == [False, True, True, True, True, False, True]


async def test_a_prompt_that_is_taken_in_part_counts_once_however_often_the_rest_is_sent() -> None:
    generation, verifier, drafter = generation_of([4] * 3 * CHUNK_TOKENS), FakeVerifier(), FakeDrafter(1.0)
    rounds = [await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, LIMITS) for _ in range(4)]
    assert [one.prompt_token_count for one in rounds] == [CHUNK_TOKENS, CHUNK_TOKENS, CHUNK_TOKENS - 1, 0]
    # Tokens of a prompt that only wait for their turn are no drafts: they would make drafts look free.
    assert [RoundWork.of(one).drafted_count for one in rounds[:3]] == [0, 0, 3]


async def test_what_a_service_does_not_report_of_a_call_is_the_wires() -> None:
    clock = Clock()
    drafter = FakeDrafter(1.0, before=lambda _: clock.advance(4))
    verifier = FakeVerifier(lambda _: clock.advance(10), timing=CallTiming(queued_s=2, executed_s=5))
    report = await timed_round(drafter, verifier, clock)
    assert report.propose == HopTime(wire_s=4)
    assert report.verify == HopTime(wire_s=3, queued_s=2, executed_s=5)
    assert report.duration_s == report.propose.total_s + report.verify.total_s == 14


async def test_a_round_tells_how_long_the_models_worked_for_other_coordinators() -> None:
    verifier = FakeVerifier(timing=CallTiming(queued_s=4, executed_s=1, others_s=3))
    assert (await timed_round(FakeDrafter(1.0), verifier, Clock())).others_s == 3


async def test_a_generation_whose_caches_were_given_up_to_others_is_sent_whole() -> None:
    class Full:
        """A model service that gave up all caches it had."""

        is_full = False

        def append(self, row: ProposeRow | VerifyRow, token_ids: Sequence[int]) -> list[int]:
            if self.is_full:
                raise CacheFull("for an older one", {"missing_bytes": "9", "cached_length": "0"})
            return super().append(row, token_ids)  # type: ignore[misc,no-any-return]

    class FullDrafter(Full, FakeDrafter):
        """A draft service."""

    class FullVerifier(Full, FakeVerifier):
        """A target service."""

    generation, drafter, verifier = generation_of(), FullDrafter(1.0), FullVerifier()

    async def round_of(*, is_full: bool) -> RoundReport:
        drafter.is_full = verifier.is_full = is_full
        return await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, LIMITS)

    await round_of(is_full=False)
    assert generation.target_cached_length and generation.draft_cached_length
    report = await round_of(is_full=True)
    assert report.shortage and report.shortage.missing_bytes == {generation: 9}
    assert (generation.target_cached_length, generation.draft_cached_length) == (0, 0)
    drafter.token_ids.clear()
    verifier.token_ids.clear()
    assert (await round_of(is_full=False)).rows


async def test_the_time_of_a_draft_that_failed_is_counted() -> None:
    clock = Clock()

    def fail(_: int) -> None:
        clock.advance(7)
        raise PeerUnavailable("down")

    report = await timed_round(FakeDrafter(1.0, before=fail), FakeVerifier(), clock)
    assert report.propose == HopTime(wire_s=7)
    assert report.draft_error is not None


async def test_a_generation_that_the_draft_cannot_read_is_drafted_no_more() -> None:
    class Small(FakeDrafter):
        def append(self, row: ProposeRow | VerifyRow, token_ids: Sequence[int]) -> list[int]:
            raise InvalidRequest("token id 50 is not in the vocabulary of 50 tokens")

    generation, drafter, verifier = generation_of(), Small(1.0), FakeVerifier()
    for _ in range(3):
        await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, LIMITS)
    assert len(drafter.calls) == 1
    assert generation.usage.output_count == 3


async def test_a_prompt_for_which_a_draft_service_has_no_room_is_brought_ever_more_rarely() -> None:
    """It came with each round, up to 16,384 tokens, and took their time of which `auto` learns what drafts cost."""

    class Full(FakeDrafter):
        is_full = True

        def append(self, row: ProposeRow | VerifyRow, token_ids: Sequence[int]) -> list[int]:
            if self.is_full:
                raise CacheFull("no room", {"missing_bytes": "9"})
            return super().append(row, token_ids)

    generation, drafter, verifier = generation_of([4] * 3 * CHUNK_TOKENS, 400), Full(1.0), FakeVerifier()

    async def calls_in(rounds: int) -> int:
        before = len(drafter.calls)
        for _ in range(rounds):
            await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, LIMITS)
        return len(drafter.calls) - before

    assert 6 <= await calls_in(100) <= 12
    drafter.is_full = False
    assert await calls_in(70) > 1 and generation.usage.accepted_count, "it has drafts once there is room"
    assert await calls_in(5) == 5


async def test_a_prompt_whose_first_part_finds_room_each_time_is_brought_ever_more_rarely_too() -> None:
    """Others take the room before the rest comes. The pause began anew with each first part, so it came each round."""

    class Taken(FakeDrafter):
        def _propose(self, row: ProposeRow) -> Proposal | PacelineError:
            if row.base_length:
                return CacheFull("an older one needed the room", {"missing_bytes": "9", "cached_length": "0"})
            return Proposal((), CHUNK_TOKENS)

    generation, drafter, verifier = generation_of([4] * 3 * CHUNK_TOKENS, 400), Taken(1.0), FakeVerifier()
    for _ in range(100):
        await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, LIMITS)
    assert 12 <= len(drafter.calls) <= 24


async def test_statistics_add_the_hops_of_all_rounds() -> None:
    clock, statistics = Clock(), Statistics()
    verifier = FakeVerifier(lambda _: clock.advance(3), timing=CallTiming(queued_s=1, executed_s=2))
    for _ in range(3):
        statistics.count_report(await timed_round(FakeDrafter(1.0), verifier, clock))
    counted = statistics.snapshot()
    assert counted.verify == HopTime(queued_s=3, executed_s=6)
    assert counted.round_s == 9
