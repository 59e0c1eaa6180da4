"""What a draft service sends unasked, whatever it says: no output changes, memory is bounded, and streams go on."""

from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from coordinator.drafting.prepared import PreparedDrafter
from coordinator.drafting.prepared_choices import MOST_CHOICES, PreparedChoices
from coordinator.protocols import Deadline
from coordinator.replicas.clients import RemoteDrafter
from paceline.checks import MAX_PREPARED_COUNT
from paceline.codec.rounds import prepared_from_pb, prepared_to_pb
from paceline.codec.versions import VERSION
from paceline.prefix_hash import extended_hash
from paceline.types import PreparedDrafts, Proposal, ProposeRow
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer
from paceline.wire import open_channel
from tests.coordinator.test_prepared import PROMPT, PreparingDrafter, outputs, prepared_of
from tests.fakes.draft_servers import draft_server
from tests.fakes.fake_time import FakeTime
from tests.fakes.model_services import VOCABULARY_SIZE, Clock, FakeDrafter, continuation, next_token

COUNTS = (24, 17, 9)
"""New tokens of the prompts that are served at once."""
ENDS = (-(2**31), -1, VOCABULARY_SIZE, 2**31 - 1)
"""Ids that the target does not have."""

Lies = Callable[[str, Sequence[int]], list[PreparedDrafts]]
"""What is told for a sequence of these tokens, which will be its own."""


def told(name: str, prefix: Sequence[int], token_ids: Sequence[int]) -> PreparedDrafts:
    return PreparedDrafts(name, len(prefix), extended_hash(0, prefix), tuple(token_ids))


def wrong_tokens(name: str, prefix: Sequence[int]) -> list[PreparedDrafts]:
    return [told(name, prefix, [(one + 1) % VOCABULARY_SIZE for one in continuation(prefix, 6)])]


def unknown_tokens(name: str, prefix: Sequence[int]) -> list[PreparedDrafts]:
    right = next_token(prefix)
    return [told(name, prefix, (right, *ENDS)), told(name, [*prefix, right], ENDS)]


def too_many_tokens(name: str, prefix: Sequence[int]) -> list[PreparedDrafts]:
    return [told(name, prefix, continuation(prefix, 3) * 1000)]


def a_flood(name: str, prefix: Sequence[int]) -> list[PreparedDrafts]:
    flood = [PreparedDrafts(name, n - 100, n, (n,) * 16) for n in range(MAX_PREPARED_COUNT - 1)]
    return [*flood, *wrong_tokens(name, prefix)]


def nothing(name: str, prefix: Sequence[int]) -> list[PreparedDrafts]:
    return [PreparedDrafts("", 0, 0, ()), told(name, prefix, ()), PreparedDrafts(name, -(2**31), 2**32 - 1, ENDS)]


def for_strangers(name: str, prefix: Sequence[int]) -> list[PreparedDrafts]:
    return [told(f"{name}{n}" * 100, prefix, (1, 2)) for n in range(50)]


class LyingDrafter(PreparingDrafter):
    """Tells lies of every sequence that it holds with each call, those of other requests too. What it answers is true.

    The prefixes are those that come: the tokens after them would be drafts.
    """

    def __init__(self, time: FakeTime, lies: Lies) -> None:
        super().__init__(time, 1.0)
        self._lies = lies

    def prepared(self, row: ProposeRow, result: Proposal) -> list[PreparedDrafts]:
        found: list[PreparedDrafts] = []
        for name, held in self.token_ids.items():
            # All drafts are accepted, the last of which is not cached, and then a token of the target's own comes.
            lies = self._lies(name, [*held, *continuation(held, 2)])
            found += prepared_from_pb(prepared_to_pb(lies))
        return found


KINDS: dict[Lies, bool] = {
    wrong_tokens: True,
    unknown_tokens: True,
    too_many_tokens: True,
    a_flood: True,
    nothing: False,
    for_strangers: False,
}
"""Whether rounds have drafts by them."""


@pytest.mark.parametrize("draft_count", [1, 4])
@pytest.mark.parametrize("lies", KINDS)
async def test_no_lie_changes_an_output(lies: Lies, draft_count: int) -> None:
    time = FakeTime()
    drafter = LyingDrafter(time, lies)
    prepared = prepared_of(time, drafter)
    found = await time.run(outputs(time, drafter, COUNTS, lanes=2, draft_count=draft_count, prepared=prepared))
    assert found == [continuation((*PROMPT, number), count) for number, count in enumerate(COUNTS)]
    assert (prepared.hit_count > 0) is KINDS[lies]
    assert prepared._choices._choices == {}


def test_what_is_told_of_a_sequence_that_ended_or_that_nobody_asked_about_is_not_kept() -> None:
    choices = PreparedChoices()
    choices.expect("ended")
    choices.add(told("ended", PROMPT, (1, 2)))
    choices.forget(["ended"])
    for name in ("ended", "unknown"):
        choices.add(told(name, PROMPT, (1, 2)))
    assert choices._choices == {}


def test_of_one_message_no_more_is_read_than_any_service_has_to_tell_at_once() -> None:
    """One of 16 MiB kept a coordinator for half a minute, in which it answered nobody."""
    tokens = tuple(range(3 * MAX_PREPARED_COUNT))
    read = prepared_from_pb(prepared_to_pb([told("a", PROMPT, tokens)] * 3 * MAX_PREPARED_COUNT))
    assert read == [told("a", PROMPT, tokens[:MAX_PREPARED_COUNT])] * MAX_PREPARED_COUNT


class UnaskingServicer(DraftServiceServicer):
    """Sends messages unasked before and after each answer."""

    def __init__(self, unasked: Sequence[pb.ProposeTokensResponse]) -> None:
        self.unasked = unasked
        self.stream_count = 0

    async def ProposeTokens(
        self, requests: AsyncIterator[pb.ProposeTokensRequest], context: object
    ) -> AsyncIterator[pb.ProposeTokensResponse]:
        self.stream_count += 1
        async for request in requests:
            results = [pb.ProposeTokensResult(sequence_id=row.sequence_id, draft_token_ids=[7]) for row in request.rows]
            for message in (
                *self.unasked,
                pb.ProposeTokensResponse(results=results, wire_version=VERSION),
                *self.unasked,
            ):
                yield message


async def test_no_lie_ends_the_reading_of_a_stream() -> None:
    lies = [prepared_to_pb(tell("a", PROMPT)) for tell in KINDS]
    servicer = UnaskingServicer(lies)  # type: ignore[abstract]
    async with draft_server(servicer) as (_, address), open_channel(address) as channel:
        remote = RemoteDrafter(channel, 60.0)
        drafter, row = PreparedDrafter(FakeDrafter(1.0), Clock()), ProposeRow("a", 0, PROMPT, 1)
        await drafter.propose([row], Deadline())  # so that it takes in what is told of the row's sequence
        remote.listen(drafter.take)
        for _ in range(4):
            assert (await remote.propose([row])).results == [Proposal((7,), 0)]
        assert servicer.stream_count == 1
        assert len(drafter._choices._choices["a"]) == MOST_CHOICES
