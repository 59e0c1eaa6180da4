"""Calls stay small however long the prompts: tokens in rows, parts of a prompt, and cached prefixes."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.protocols import Deadline
from coordinator.replicas.plausibility import check_proposals, check_verdicts
from coordinator.rounds.prompt_shares import CALL_TOKENS, CHUNKS_BROUGHT, prompt_shares
from coordinator.rounds.round import RoundLimits, run_round
from coordinator.rounds.wishes import Wish
from draft_service.drafter import Drafter
from paceline.checks import DECODED_TOKENS
from paceline.engine.loading import load_model
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.errors import InvalidRequest, PacelineError, PeerFailed
from paceline.types import DraftSource, Prefilled, Proposal, Proposals, ProposeRow, Verdict, Verdicts, VerifyRow
from target_service.verifier import Verifier
from tests.checkpoints import MAX_LENGTH
from tests.checkpoints import VOCABULARY_SIZE as MODEL_VOCABULARY_SIZE
from tests.conftest import PairOfCheckpoints
from tests.coordinators import MODEL, asking
from tests.fakes.device_kernels import device_backend
from tests.fakes.model_services import CHUNK_TOKENS, VOCABULARY_SIZE, FakeDrafter, FakeVerifier, next_token
from tests.generations import generation_of

pytestmark = pytest.mark.review
LIMITS = RoundLimits(VOCABULARY_SIZE, CHUNK_TOKENS)
LONG = tuple(5 + number * number % 90 for number in range(MAX_LENGTH - 10))
COUNTS = st.integers(1, 3 * CALL_TOKENS)


@pytest.fixture
def model(pairs: dict[str, PairOfCheckpoints]) -> LoadedModel:
    return load_model(str(pairs["Llama"].target))


@given(
    rows=st.lists(st.tuples(COUNTS, st.none() | st.integers(0, CALL_TOKENS)), min_size=1, max_size=20),
    chunk_tokens=st.integers(0, 1000),
)
def test_a_call_is_bounded_and_its_first_prompt_and_its_decoding_rows_are_always_served(
    rows: list[tuple[int, int | None]], chunk_tokens: int
) -> None:
    """review C8"""
    lacks, taken = [lack for lack, _ in rows], [count for _, count in rows]
    shares = prompt_shares(lacks, taken.__getitem__, chunk_tokens)
    assert all(0 <= share <= lack for share, lack in zip(shares, lacks, strict=True))
    prompts = [index for index, lack in enumerate(lacks) if lack > DECODED_TOKENS]
    assert all(share == lack for share, lack in zip(shares, lacks, strict=True) if lack <= DECODED_TOKENS)
    assert all(shares[index] for index in prompts[:1])
    assert sum(shares[index] for index in prompts) <= CALL_TOKENS + max(CHUNKS_BROUGHT * chunk_tokens, DECODED_TOKENS)
    known = [index for index in prompts if taken[index] is not None]
    assert all(shares[index] <= max(chunk_tokens, DECODED_TOKENS, taken[index] or 0) for index in known)


class ChunkedDrafter(FakeDrafter):
    """Takes at most a chunk of a prompt, like the model services."""

    def _propose(self, row: ProposeRow) -> Proposal | PacelineError:
        if len(row.token_ids) <= CHUNK_TOKENS:
            return super()._propose(row)
        return Proposal((), len(self.append(row, row.token_ids[:CHUNK_TOKENS])))


@pytest.mark.parametrize("chunk_count", [1, 7, 40])
async def test_what_is_sent_of_a_prompt_grows_with_its_length_and_not_with_the_square(chunk_count: int) -> None:
    """review C8: each chunk's call brought the whole rest of the prompt."""
    prompt = [4 + number % 40 for number in range(chunk_count * CHUNK_TOKENS)]
    generation, drafter, verifier = generation_of(prompt, 2 * chunk_count), ChunkedDrafter(1.0), FakeVerifier()
    while not generation.ended:
        await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, LIMITS)
    committed = generation.token_ids
    assert len(committed) == len(prompt) + 2 * chunk_count
    assert all(committed[stop] == next_token(committed[:stop]) for stop in range(len(prompt), len(committed)))
    for calls in (verifier.calls, drafter.calls):
        first, *others = [len(row.token_ids) for call in calls for row in call]
        # Its last token comes to the draft service with the row that asks for drafts.
        whole = {len(prompt), len(prompt) - 1} if calls is drafter.calls else {len(prompt)}
        assert first in whole, "some other generation's cache may hold it"
        assert max(others, default=0) <= CHUNK_TOKENS
        assert len(others) >= chunk_count - 1


async def test_prompts_that_a_call_has_no_chunk_for_are_not_sent_with_it() -> None:
    """review C8: 64 prompts of 2,000 tokens were sent whole each call."""
    generations = [generation_of([5 + number, *range(4, 44)] * 4, name=str(number)) for number in range(20)]
    verifier = FakeVerifier()
    for _ in range(20):
        await run_round(asking(generations, [0] * 20), {MODEL: FakeDrafter(1.0)}, verifier, LIMITS)
    sizes = [sum(len(row.token_ids) for row in call) for call in verifier.calls[1:]]
    assert max(sizes) <= (CHUNKS_BROUGHT + len(generations)) * CHUNK_TOKENS
    assert all(generation.usage.output_count for generation in generations[:4])


async def test_a_part_of_a_prompt_has_no_drafts_where_the_chunk_is_larger_than_a_call() -> None:
    """The target refuses drafts behind a part, and the request failed."""
    generation, verifier = generation_of([4 + number % 40 for number in range(CALL_TOKENS + 9)], 20), FakeVerifier()
    wishes = {generation: Wish(3, MODEL, DraftSource.SUFFIX, (8, 9))}
    await run_round(wishes, {MODEL: FakeDrafter(1.0)}, verifier, RoundLimits(VOCABULARY_SIZE, 2 * CALL_TOKENS))
    ((row,),) = verifier.calls
    assert (len(row.token_ids), row.following_count, row.draft_token_ids) == (CALL_TOKENS, 9, ())


class Meanwhile(ChunkedDrafter):
    """Answers what asks for no drafts once the target has been asked too."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(1.0)
        self.target_is_asked = asyncio.Event()
        self.fails = fails

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        if any(row.following_count for row in rows):
            await self.target_is_asked.wait()
            if self.fails:
                raise PeerFailed("the draft failed")
        return await super().propose(rows, deadline)


async def test_a_draft_service_takes_a_prompt_in_beside_the_target_and_drafts_at_once_then() -> None:
    prompt, drafter = [4 + number % 40 for number in range(5 * CHUNK_TOKENS)], Meanwhile()
    generation, verifier = generation_of(prompt, 20), FakeVerifier(lambda _: drafter.target_is_asked.set())
    for _ in range(4):
        await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, LIMITS)
        drafter.target_is_asked.clear()
    assert generation.draft_cached_length == generation.target_cached_length == 4 * CHUNK_TOKENS
    await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, LIMITS)
    assert (generation.usage.output_count, generation.usage.accepted_count) == (4, 3)


async def test_a_target_leaves_cores_to_a_draft_service_that_takes_a_prompt_in_beside_it() -> None:
    """It was told of looked-up tokens, and of a round without others beside it, that no draft service works."""
    decoding, coming = generation_of([5, 6, 7], 20, name="decoding"), generation_of([4] * 3 * CHUNK_TOKENS, 20)
    drafter = Meanwhile()
    verifier = FakeVerifier(lambda _: drafter.target_is_asked.set())
    looked_up = Wish(source=DraftSource.SUFFIX, token_ids=(8, 9))
    for is_alone in (False, True):
        wishes = {decoding: looked_up, coming: Wish(3, MODEL)}
        await run_round(wishes, {MODEL: drafter}, verifier, LIMITS, is_alone=is_alone)
    await run_round({decoding: looked_up}, {MODEL: drafter}, verifier, LIMITS)
    assert [call[0].draft_is_idle for call in verifier.calls] == [False, False, True]


async def test_a_prompt_that_a_draft_service_could_not_take_in_follows_later() -> None:
    prompt, drafter = [4 + number % 40 for number in range(3 * CHUNK_TOKENS)], Meanwhile(fails=True)
    generation, verifier = generation_of(prompt, 20), FakeVerifier(lambda _: drafter.target_is_asked.set())
    while not generation.usage.output_count:
        await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, LIMITS)
    drafter.fails = False
    while not generation.ended:
        await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, LIMITS)
    assert generation.usage.accepted_count
    committed = generation.token_ids
    assert all(committed[stop] == next_token(committed[:stop]) for stop in range(len(prompt), len(committed)))


async def test_a_prompt_that_asks_for_no_drafts_goes_to_the_target_alone() -> None:
    prompt, drafter, verifier = [4] * 3 * CHUNK_TOKENS, ChunkedDrafter(1.0), FakeVerifier()
    generation = generation_of(prompt, 20)
    for _ in range(3):
        await run_round(asking([generation], [0]), {MODEL: drafter}, verifier, LIMITS)
    assert not drafter.calls


async def test_a_prompt_whose_output_has_no_room_for_drafts_goes_to_the_target_alone() -> None:
    drafter, verifier, generation = ChunkedDrafter(1.0), FakeVerifier(), generation_of([4] * 3 * CHUNK_TOKENS, 1)
    while not generation.ended:
        await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, LIMITS)
    assert not drafter.calls


async def test_a_failed_verify_ends_what_draft_services_take_in_beside_it() -> None:
    def fail(number: int) -> None:
        raise PeerFailed("the target failed")

    generation, drafter = generation_of([4] * 3 * CHUNK_TOKENS, 20), Meanwhile()
    with pytest.raises(PeerFailed, match="the target failed"):
        await run_round(asking([generation], [3]), {MODEL: drafter}, FakeVerifier(fail), LIMITS)
    assert not drafter.calls


class Here:
    """A target without a wire; counts the tokens in each call."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.brought: list[int] = []

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        self.brought.append(sum(len(row.token_ids) for row in rows))
        return Verdicts(self.verifier.verify(rows))


async def rounds_to_first_token(target: Here, token_ids: Sequence[int], name: str, chunk_tokens: int) -> int:
    generation, limits = generation_of(token_ids, name=name), RoundLimits(MODEL_VOCABULARY_SIZE, chunk_tokens)
    for count in range(1, 1000):
        await run_round(asking([generation], [0]), {MODEL: FakeDrafter(1.0)}, target, limits)
        if generation.usage.output_count:
            return count
    raise AssertionError


@pytest.mark.parametrize("page_tokens", [16, 5])
async def test_what_is_cached_of_another_sequence_takes_no_call(model: LoadedModel, page_tokens: int) -> None:
    """review C8"""
    options = EngineOptions(kv_memory="4MiB", prefill_chunk_tokens=20, page_tokens=page_tokens)
    target = Here(Verifier(Runner(model, options)))
    computed = await rounds_to_first_token(target, LONG, "one", 20)
    assert computed >= len(LONG) // 20
    assert sum(target.brought) <= 2 * len(LONG) + 2 * page_tokens * computed
    assert await rounds_to_first_token(target, LONG, "two", 20) == 1
    assert await rounds_to_first_token(target, (*LONG[:-10], 7, 7), "three", 20) == 1


async def test_what_is_cached_beyond_a_call_takes_a_call_for_each_call_of_tokens(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """review C8"""
    monkeypatch.setattr("coordinator.rounds.prompt_shares.CALL_TOKENS", 50)
    target = Here(Verifier(Runner(model, EngineOptions(kv_memory="4MiB", prefill_chunk_tokens=20, page_tokens=8))))
    await rounds_to_first_token(target, LONG, "one", 20)
    taken_over = len(target.brought)
    assert await rounds_to_first_token(target, LONG, "two", 20) <= -(-len(LONG) // (50 - 8 + 1)) + 1
    assert max(target.brought[taken_over:]) <= 50


def test_a_part_is_taken_in_and_nothing_is_chosen_after_it(model: LoadedModel) -> None:
    """review C8"""
    verifier = Verifier(Runner(model, EngineOptions(kv_memory="1MiB")))
    (whole,) = verifier.verify([VerifyRow("whole", 0, LONG[:50], (5, 6))])
    assert isinstance(whole, Verdict)
    (part,) = verifier.verify([VerifyRow("a", 0, LONG[1:33], (), following_count=18)])
    assert part == Prefilled(32)
    assert verifier.runner.cache.length("a") == 32
    (part,) = verifier.verify([VerifyRow("b", 0, LONG[:32], (), following_count=18)])
    assert part == Prefilled(32, reused_count=32)
    (rest,) = verifier.verify([VerifyRow("b", 32, LONG[32:50], (5, 6), None)])
    assert isinstance(rest, Verdict)
    assert replace(rest, reused_count=0) == whole


@pytest.mark.parametrize("has_fixed_shapes", [False, True])
def test_a_part_has_no_drafts(model: LoadedModel, has_fixed_shapes: bool) -> None:
    """review C8"""
    if has_fixed_shapes:
        model = replace(model, backend=device_backend())
    drafter = Drafter(Runner(model, EngineOptions(kv_memory="1MiB")))
    for count in (8, 32):
        name = str(count)
        (part,) = drafter.propose([ProposeRow(name, 0, LONG[:count], 3, following_count=18)])
        assert part == Proposal((), count)
        (rest,) = drafter.propose([ProposeRow(name, count, LONG[count : count + 18], 3, None)])
        assert isinstance(rest, Proposal)
        assert rest == drafter.propose([ProposeRow("whole", 0, LONG[: count + 18], 3)])[0]


def test_a_part_that_cannot_be_one_is_refused(model: LoadedModel) -> None:
    """review C8"""
    verifier = Verifier(Runner(model, EngineOptions(kv_memory="1MiB")))
    rows = [
        VerifyRow("drafts", 0, (5, 6), (7,), following_count=1),
        VerifyRow("negative", 0, (5, 6), (), following_count=-1),
        VerifyRow("long", 0, (5, 6), (), following_count=MAX_LENGTH),
    ]
    refused = verifier.verify(rows)
    fields = ["draft_token_ids", "following_count", "token_ids"]
    assert [one.field for one in refused if isinstance(one, InvalidRequest)] == fields
    assert verifier.runner.cache.sequence_count == 0


def test_the_prompt_that_lacks_least_is_computed_first_whatever_its_row_brings(model: LoadedModel) -> None:
    """review C8"""
    runner = Runner(model, EngineOptions(kv_memory="1MiB", prefill_chunk_tokens=64))
    rows = [
        PackedRow("first", 0, LONG[:64], following_count=500),
        PackedRow("long", 0, LONG[100:164], following_count=500),
        PackedRow("short", 0, LONG[200:264], following_count=5),
    ]
    assert runner.forward(rows) == [Prefilled(16), Prefilled(0), Prefilled(48)]


def test_a_token_after_a_part_is_a_lie() -> None:
    """review C8: an older service would answer so, because it takes a part for the whole."""
    asked = ProposeRow("a", 0, (5, 6), 2, following_count=3)
    check_proposals([asked], Proposals([Proposal((), 2)]))
    with pytest.raises(PeerFailed):
        check_proposals([asked], Proposals([Proposal((7, 8), 3)]))
    row = VerifyRow("a", 0, (5, 6), (), following_count=3)
    check_verdicts([row], Verdicts([Prefilled(2)]), 50)
    with pytest.raises(PeerFailed):
        check_verdicts([row], Verdicts([Verdict(0, 7, 2)]), 50)
