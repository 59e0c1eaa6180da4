"""A client that reads slowly, or not at all, costs only itself. Review C9."""

import pytest

from coordinator.requests.stream import Stream
from paceline.errors import Overloaded, PeerFailed
from paceline.types import FinishReason, GenerationFinish, OutputPiece, OutputToken, Usage
from tests.coordinators import dispatching
from tests.fakes.dispatches import output, submit, until, whole
from tests.fakes.model_services import FakeDrafter, FakeVerifier

pytestmark = pytest.mark.review
UNREAD_TOKENS = 100
LONG = 300
"""Tokens of an output that exceeds the limit for unread tokens."""


@pytest.fixture(autouse=True)
def few_unread_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.requests.stream.UNREAD_TOKENS", UNREAD_TOKENS)


def piece(*token_ids: int, index: int = 0, ends: bool = False) -> OutputPiece:
    finish = GenerationFinish(FinishReason.LENGTH, Usage(1)) if ends else None
    return OutputPiece(tuple(OutputToken(one, "", False) for one in token_ids), finish, index)


async def read(stream: Stream) -> list[OutputPiece]:
    return [one async for one in stream.pieces()]


async def test_pieces_that_nobody_read_become_one_an_output_and_each_keeps_its_order() -> None:
    stream = Stream(2)
    for one in (piece(1, 2), piece(7, index=1), piece(3), piece(4, ends=True), piece(8, index=1, ends=True)):
        stream.put(one)
    assert await read(stream) == [piece(1, 2, 3, 4, ends=True), piece(7, 8, index=1, ends=True)]


async def test_an_error_comes_after_what_was_committed_before_it() -> None:
    stream = Stream()
    stream.put(piece(1, 2))
    stream.put(PeerFailed("broken"))
    pieces = stream.pieces()
    assert await anext(pieces) == piece(1, 2)
    with pytest.raises(PeerFailed):
        await anext(pieces)


@pytest.mark.parametrize("lanes", [1, 2])
async def test_a_generation_that_is_not_read_pauses_and_gives_its_place_to_others(lanes: int) -> None:
    """The generation continued to its end, stayed in memory, and took part in every round."""
    verifier = FakeVerifier()
    async with dispatching([FakeDrafter(0.7)], [verifier], batch_size=1, lanes=lanes) as running:
        unread = [submit(running, (n,), LONG) for n in range(5, 5 + lanes)]
        await until(lambda: all(one.generations[0].is_unread for one in unread))
        assert [await output(submit(running, (n,))) for n in (20, 21)] == [whole((n,)) for n in (20, 21)]
        assert all(UNREAD_TOKENS < one.generations[0].usage.output_count < UNREAD_TOKENS + 70 for one in unread)
        assert [await output(one) for one in unread] == [whole((n,), LONG) for n in range(5, 5 + lanes)]
    assert not verifier.token_ids


async def test_what_is_not_read_is_taken_back_first_where_a_cache_is_full() -> None:
    verifier = FakeVerifier(capacity_tokens=UNREAD_TOKENS + 300)
    async with dispatching([], [verifier], batch_size=2) as running:
        unread = submit(running, (5,), LONG)
        await until(lambda: unread.generations[0].is_unread)
        others = [submit(running, (n,) * 4, 200) for n in (6, 7)]
        assert [await output(one) for one in others] == [whole((n,) * 4, 200) for n in (6, 7)]
        assert running.statistics.snapshot().preemption_count == 0, "no other had to pause"
        assert await output(unread) == whole((5,), LONG)


async def test_what_is_not_read_leaves_a_draft_service_without_room_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It kept its cache there for as long as its client read nothing, and others had no drafts meanwhile."""
    monkeypatch.setattr("coordinator.rounds.residency.NEXT_REQUEST_S", 0.0)
    drafter, count = FakeDrafter(1.0, capacity_tokens=LONG), 240
    async with dispatching([drafter], [FakeVerifier()], batch_size=1) as running:
        unread = submit(running, (5,), LONG)
        await until(lambda: unread.generations[0].is_unread)
        other = submit(running, (6,), count)
        assert await output(other) == whole((6,), count)
        assert other.generations[0].usage.round_count < 0.3 * count, "all of three drafts are right"
        assert await output(unread) == whole((5,), LONG)
    assert not drafter.token_ids


async def test_what_is_not_read_counts_as_waiting_and_leaves_with_its_client() -> None:
    verifier, drafter = FakeVerifier(), FakeDrafter(0.7)
    async with dispatching([drafter], [verifier], batch_size=1, queue_limit=1) as running:
        requests = []
        for n in (5, 6):
            requests.append(submit(running, (n,), LONG))
            await until(lambda: requests[-1].generations[0].is_unread)
        with pytest.raises(Overloaded):
            submit(running, (7,))
        for request in requests:
            running.dispatcher.abandon(request)
        await until(lambda: running.dispatcher.waiting_count == 0)
