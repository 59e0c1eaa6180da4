"""Prompts that begin alike: which replica each goes to, and what that spares."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.placement.matching import PASSES_A_TARGET, Matching
from coordinator.placement.queue import WaitingQueue
from coordinator.replicas.replica import Replica
from coordinator.replicas.stickiness import (
    BLOCK_TOKENS,
    COMMON_WAYS,
    LOAD_BOUND,
    Beginnings,
    SentBeginnings,
    Stickiness,
    beginnings_of,
)
from coordinator.requests.generation import Request
from paceline.errors import PeerUnavailable
from paceline.types import CacheDescription, GenerationRequest, TokenIds
from tests.coordinators import SERVED, Dispatched, admission, dispatching
from tests.fakes.dispatches import output, submit, whole
from tests.fakes.model_services import Clock, FakeDrafter, FakeVerifier
from tests.fakes.shared_prefixes import LoadSeen, SharingVerifier, Talk, converse, sharing, words

ROOMY = CacheDescription()


@dataclass(eq=False)
class Shelf:
    """A replica as stickiness sees it."""

    address: str
    count: int = 0
    sent: SentBeginnings | None = field(default_factory=lambda: SentBeginnings(ROOMY))

    @property
    def load(self) -> tuple[int, float]:
        return self.count, 0.0


def shelves(count: int) -> list[Shelf]:
    return [Shelf(f"10.0.0.{n}:50053") for n in range(count)]


def prompt(name: object, block_count: int = 4) -> tuple[int, ...]:
    return words(random.Random(f"{name}"), block_count * BLOCK_TOKENS)


def beginnings(token_ids: Sequence[int]) -> Beginnings:
    return beginnings_of(token_ids, len(token_ids))


def placed(stickiness: Stickiness, replicas: list[Shelf], token_ids: Sequence[int]) -> Shelf:
    found = beginnings(token_ids)
    home = stickiness.home(replicas, replicas, found) or min(replicas, key=lambda one: one.load)
    stickiness.note(home, replicas, found)
    return home


@given(st.integers(2, 6), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=30))
def test_a_prompt_goes_where_its_beginning_went_while_there_is_room(
    replica_count: int, turns: list[tuple[int, int]]
) -> None:
    """Prompts that grow, one after the other, so that loads bound nothing."""
    stickiness, replicas = Stickiness(), shelves(replica_count)
    said: dict[int, tuple[int, ...]] = {}
    homes: dict[int, Shelf] = {}
    for talk, token_count in turns:
        said[talk] = said.get(talk, prompt(talk)) + words(random.Random(len(said)), token_count)
        home = placed(stickiness, replicas, said[talk] + (1,))
        assert homes.setdefault(talk, home) is home


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 4)), max_size=60))
def test_no_replica_gets_more_than_its_bounded_share_of_the_load(
    replica_count: int, events: list[tuple[int, bool, int]]
) -> None:
    stickiness, replicas = Stickiness(), shelves(replica_count)
    for family, ends, number in events:
        home = placed(stickiness, replicas, prompt(family) + prompt(number, 1))
        home.count += 1
        assert home.count <= ceil(LOAD_BOUND * sum(one.count for one in replicas) / replica_count)
        if ends:
            max(replicas, key=lambda one: one.count).count -= 1


def test_a_replica_that_leaves_moves_only_its_own_prompts_and_spreads_them() -> None:
    replicas = shelves(5)
    before = {n: placed(Stickiness(), replicas, prompt(n)) for n in range(200)}
    left = replicas[2]
    others = [Shelf(one.address) for one in replicas if one is not left]
    after = {n: placed(Stickiness(), others, prompt(n)) for n in range(200)}
    stayed = [n for n, home in before.items() if home is not left]
    assert [after[n].address for n in stayed] == [before[n].address for n in stayed]
    moved = Counter(after[n].address for n, home in before.items() if home is left)
    assert len(moved) == 4


def test_coordinators_that_never_talked_choose_alike() -> None:
    ours, theirs = shelves(4), shelves(4)[::-1]
    mine, other = Stickiness(), Stickiness()
    for n in range(100):
        grown = prompt(n) + prompt(-n, 2)
        assert placed(mine, ours, prompt(n)).address == placed(other, theirs, grown).address


def test_what_most_prompts_begin_with_is_spread_and_conversations_still_stay() -> None:
    stickiness, replicas, system = Stickiness(), shelves(3), prompt("system", 10)
    talks = [system + prompt(n, 2) for n in range(300)]
    homes = [placed(stickiness, replicas, talk) for talk in talks]
    # Until the beginning is known to be common, all went to the replica that had it.
    learnt = COMMON_WAYS * len(replicas) + 1
    assert len(set(homes[:learnt])) == 1
    assert max(Counter(homes[learnt:]).values()) <= 1.3 * len(homes[learnt:]) / len(replicas)
    again = [placed(stickiness, replicas, talk + prompt(-n, 2)) for n, talk in enumerate(talks)]
    assert again[learnt:] == homes[learnt:]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=30))
def test_memory_is_bounded_and_forgets_no_beginning_before_a_longer_one(sent: list[tuple[int, int]]) -> None:
    kept = SentBeginnings(CacheDescription(capacity_bytes=20 * BLOCK_TOKENS, token_bytes=1))
    for name, block_count in sent:
        found = beginnings(prompt(name, 13)[: block_count * BLOCK_TOKENS + 1])
        kept.add(found)
        assert kept.count(found) == len(found)
    counts = [kept.count(beginnings(prompt(name, 13))) for name in range(6)]
    assert sum(counts) <= 20
    assert all(kept.count([one]) for name, count in enumerate(counts) for one in beginnings(prompt(name, 13))[:count])


@dataclass(eq=False)
class Place(Shelf):
    """A target as placement sees it."""

    room: int = 1
    is_on_trial: bool = False
    is_healthy: bool = True
    is_usable: bool = True


def test_a_request_whose_target_stays_full_is_passed_over_a_bounded_number_of_times() -> None:
    places: list[Any] = [Place("full", room=0), Place("free")]
    full, free = places
    matching, queue = Matching(), WaitingQueue(100, Clock())
    for place in places:
        matching._stickiness.note(place, places, beginnings(prompt(place.address)))

    def queued(name: str) -> Request:
        request = admission(SERVED).admit(GenerationRequest(TokenIds(prompt(name)), 9))
        queue.add(request)
        return request

    oldest = queued(full.address)
    for _ in range(PASSES_A_TARGET * len(places)):
        younger = queued(free.address)
        assert matching.next(queue, places) == (free, younger.generations)
        queue.remove(younger.generations)
    queued(free.address)
    assert matching.next(queue, places) == (free, oldest.generations)


def test_replicas_that_share_nothing_are_chosen_by_load() -> None:
    replicas = shelves(2)
    for one in replicas:
        one.sent = None
    assert Stickiness().home(replicas, replicas, beginnings(prompt(1))) is None


TALK = Talk(conversation_count=30, turn_count=5, system_tokens=160)


def talked(talk: Talk, *, tells: bool, batch_size: int) -> tuple[int, LoadSeen]:
    """Hold the conversations with three targets; return the prompt tokens computed, and the loads."""

    async def run() -> tuple[int, LoadSeen]:
        targets = [SharingVerifier(n, tells=tells) for n in range(3)]
        async with dispatching([], targets, batch_size=batch_size) as running:
            seen = await converse([running], talk)
        return sum(one.computed_count for one in targets), seen

    return asyncio.run(run())


def test_conversations_compute_far_fewer_prompt_tokens_and_loads_stay_even() -> None:
    blind, _ = talked(TALK, tells=False, batch_size=16)
    sticky, seen = talked(TALK, tells=True, batch_size=16)
    assert blind >= 1.5 * sticky
    assert seen.unevenness <= 1.3


def test_conversations_stay_where_they_are_while_others_wait_for_a_place() -> None:
    blind, _ = talked(TALK, tells=False, batch_size=4)
    sticky, seen = talked(TALK, tells=True, batch_size=4)
    assert blind >= 1.5 * sticky
    assert seen.most_passed <= 3 * PASSES_A_TARGET


async def test_several_coordinators_spare_most_of_it_too() -> None:
    computed = []
    for tells in (False, True):
        targets = [SharingVerifier(n, tells=tells) for n in range(3)]
        async with AsyncExitStack() as stack:
            running = [await stack.enter_async_context(dispatching([], targets, batch_size=16)) for _ in range(2)]
            await converse(running, TALK)
        computed.append(sum(one.computed_count for one in targets))
    assert computed[0] >= 1.3 * computed[1]


async def asked(running: Dispatched, targets: Sequence[SharingVerifier], said: Sequence[tuple[int, ...]]) -> list[int]:
    """Ask one after the other, and compare the outputs; return the target of each."""
    homes = []
    for one in said:
        before = [len(target.prompt_ids) for target in targets]
        assert await output(submit(running, one)) == whole(one)
        homes.append(next(n for n, target in enumerate(targets) if len(target.prompt_ids) > before[n]))
    return homes


async def lost_and_found(replica: Replica[FakeVerifier]) -> None:
    replica.lose(PeerUnavailable("its connection broke"))
    for _ in range(10):  # its rounds end
        await asyncio.sleep(0)
    await replica.look()


async def test_a_conversation_stays_where_it_moved_until_another_process_answers_there() -> None:
    targets, said = [SharingVerifier(n) for n in range(2)], [prompt(n) for n in range(6)]
    async with dispatching([], targets) as running:
        first, second = running.targets
        assert set(await asked(running, targets, said)) == {0, 1}
        targets[0].is_draining = True
        await first.look()
        assert set(await asked(running, targets, said)) == {1}
        targets[0].is_draining = False
        targets[0].restart("another process")
        await first.look()
        assert set(await asked(running, targets, [one + (7, 8) for one in said])) == {1}
        await lost_and_found(second)
        assert set(await asked(running, targets, [one + (7, 9) for one in said])) == {1}
        targets[1].restart("yet another process")
        await lost_and_found(second)
        assert set(await asked(running, targets, said)) == {0, 1}


async def test_drafts_of_prompts_that_begin_alike_come_from_one_replica() -> None:
    drafters = [FakeDrafter(0.8) for _ in range(3)]
    for n, one in enumerate(drafters):
        one.description = sharing(one.description, f"draft {n}", 100)
    homes: dict[int, set[int]] = {n: set() for n in range(6)}
    async with dispatching(drafters, [SharingVerifier()]) as running:
        for n in [*homes] * 3:
            before = [len(one.calls) for one in drafters]
            said = prompt(n) + words(random.Random(n), sum(before) % 50)
            assert await output(submit(running, said)) == whole(said)
            homes[n] |= {place for place, one in enumerate(drafters) if len(one.calls) > before[place]}
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) > 1
