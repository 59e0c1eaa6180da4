"""The promise: float32 greedy output through the three services equals Hugging Face `generate` at batch 1."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from threading import Event
from typing import Any, Literal

import pytest

from draft_service.preparing import Preparing
from paceline.cli.prompts import PROMPTS
from paceline.engine.attention import short as short_attention
from paceline.engine.calls import Call
from paceline.engine.options import EngineOptions
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.types import (
    ComputeDescription,
    GenerationRequest,
    Layout,
    PolicyName,
    ProposeRow,
    SamplingParameters,
    TokenIds,
    Usage,
    UserMessage,
    VerifyRow,
)
from target_service.verifier import Verifier
from tests.checkpoints import FAMILIES, VOCABULARY_SIZE
from tests.clusters import Cluster, cluster
from tests.conftest import PairOfCheckpoints
from tests.fakes.device_kernels import loading
from tests.scrapes import value

BATCH_SIZES = (1, 4, 8)
DRAFT_COUNTS = (0, 1, 5)
PROBLEMS = [(prompt, (30, 80, 120)[number % 3]) for number, prompt in enumerate(PROMPTS[:8])]
PROMPT_LENGTHS = (1, 2, 3, 5, 17, 33, 64, 70, 120, 250, 8, 130)


Requests = Callable[[int], list[tuple[tuple[int, ...], int]]]
"""Prompts and limits by seed."""


def requests(seed: int) -> list[tuple[tuple[int, ...], int]]:
    """Return prompts of very different lengths; their limits make them end at different times."""
    rng = random.Random(seed)
    return [
        (tuple(rng.randrange(8, VOCABULARY_SIZE) for _ in range(length)), rng.choice([1, 9, 30, 48]))
        for length in PROMPT_LENGTHS
    ]


async def generate(
    running: Cluster, prompts: Sequence[tuple[tuple[int, ...], int]], draft_count: int | None
) -> tuple[list[list[int]], list[Usage]]:
    """Send all prompts at once with staggered starts, so that sequences join while others leave."""

    async def one(number: int, prompt: tuple[int, ...], limit: int) -> tuple[list[int], Usage]:
        for _ in range(number * 3):
            await asyncio.sleep(0)
        request = GenerationRequest(TokenIds(prompt), max_new_tokens=limit, max_draft_count=draft_count)
        completion = await running.client.complete(request)
        return completion.token_ids, completion.finish.usage

    results = await asyncio.gather(*(one(n, prompt, limit) for n, (prompt, limit) in enumerate(prompts)))
    return [tokens for tokens, _ in results], [usage for _, usage in results]


def sampled(*values: Any, is_sampled: bool) -> Any:
    """Return parameters of a test; those that are not sampled run when asked for."""
    return pytest.param(*values, marks=() if is_sampled else pytest.mark.long)


@pytest.mark.parametrize(
    ("family", "batch_size"),
    [
        sampled(family, size, is_sampled=family == FAMILIES[0] or size == 4)
        for family in FAMILIES
        for size in BATCH_SIZES
    ],
)
async def test_tiny_pairs_equal_hugging_face(family: str, batch_size: int, pairs: dict[str, PairOfCheckpoints]) -> None:
    pair = pairs[family]
    prompts = requests(seed=3)
    expected = greedy_outputs(str(pair.target), requests, seed=3)
    accepted = 0
    async with cluster(pair.target, pair.draft, batch_size=batch_size) as running:
        for draft_count in DRAFT_COUNTS:
            outputs, usages = await generate(running, prompts, draft_count)
            assert outputs == expected, f"{draft_count} drafts"
            accepted += sum(usage.accepted_count for usage in usages)
            assert all(usage.drafted_count == 0 for usage in usages) or draft_count > 0
    # Rejections alone would not test acceptance, nor the other way round.
    assert accepted > 100 / len(BATCH_SIZES)


def prepare_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every draft service prepare from the start: ones on a near target's cores, as here, do not."""
    monkeypatch.setattr(ComputeDescription, "has_room_beside", lambda one, other: True)


def verify_after_preparing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the target verify when the draft has prepared all that it was asked to, as a slow target does."""
    is_done = Event()
    work, follow, verify = Preparing.work, Preparing.follow, Verifier.verify_calls

    def watched_work(self: Preparing) -> Any:
        if (made := work(self)) is None:
            is_done.set()
        return made

    def watched_follow(self: Preparing, row: ProposeRow, *rest: Any) -> None:
        follow(self, row, *rest)
        if row.prepare_count:
            is_done.clear()

    def late_verify(self: Verifier, calls: Sequence[Call[VerifyRow]]) -> Any:
        if any(row.draft_token_ids for call in calls for row in call.rows):  # nothing is prepared for others
            is_done.wait(0.2)
        return verify(self, calls)

    prepare_at_once(monkeypatch)
    monkeypatch.setattr(Preparing, "work", watched_work)
    monkeypatch.setattr(Preparing, "follow", watched_follow)
    monkeypatch.setattr(Verifier, "verify_calls", late_verify)


@pytest.mark.parametrize(
    ("batch_size", "is_right"),
    [sampled(size, is_right, is_sampled=is_right == (size == 1)) for size in (1, 8) for is_right in (True, False)],
)
async def test_prepared_rounds_change_no_output(
    batch_size: int, is_right: bool, pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_after_preparing(monkeypatch)
    pair = pairs["Llama"]
    prompts = requests(seed=4)
    asked = GenerationRequest(TokenIds((9, 10, 11)), 60, sampling=SamplingParameters(temperature=0.7), seed=8)
    draft = pair.target if is_right else pair.draft
    async with cluster(pair.target, draft, batch_size=batch_size) as running:
        outputs, _ = await generate(running, prompts, None)
        assert outputs == greedy_outputs(str(pair.target), requests, seed=4)
        drafted = await asyncio.gather(*(running.client.complete(replace(asked, seed=n)) for n in range(batch_size)))
        plain = [await running.client.complete(replace(asked, seed=n, max_draft_count=0)) for n in range(batch_size)]
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        rows, hits = (value(running.registry, f"prepared_{one}_total") for one in ("rows", "hits"))
        assert 0 < hits <= rows
    assert running.held_sequence_count == 0


@pytest.mark.parametrize("kv_memory", ["160KiB"])
async def test_prepared_rounds_change_no_output_when_the_drafts_cache_is_scarce(
    kv_memory: str, pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_at_once(monkeypatch)
    pair = pairs["Llama"]
    options = EngineOptions(kv_memory=kv_memory)
    async with cluster(pair.target, pair.draft, batch_size=8, options=options) as running:
        outputs, _ = await generate(running, requests(seed=4), None)
    assert outputs == greedy_outputs(str(pair.target), requests, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize("draft_counts", [(0, 5), pytest.param((1,), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("batch_size", [sampled(size, is_sampled=size == 8) for size in BATCH_SIZES])
async def test_the_built_in_pair_equals_hugging_face(batch_size: int, draft_counts: tuple[int, ...]) -> None:
    expected = expected_solutions()  # not while services run in this loop: their calls would run out of time
    async with cluster("builtin:target", "builtin:draft", batch_size=batch_size) as running:
        for draft_count in draft_counts:
            completions = await asyncio.gather(
                *(
                    running.client.complete(
                        GenerationRequest(UserMessage(prompt), max_new_tokens=limit, max_draft_count=draft_count)
                    )
                    for prompt, limit in PROBLEMS
                )
            )
            assert [completion.token_ids for completion in completions] == expected
    assert running.held_sequence_count == 0


@cache
def expected_solutions() -> list[list[int]]:
    reference = HuggingFaceReference("builtin:target", "float32")
    return [reference.generate(reference.encode(prompt, chat=True), limit) for prompt, limit in PROBLEMS]


@pytest.mark.slow
async def test_the_built_in_draft_is_accepted_on_problems_it_never_saw() -> None:
    async with cluster("builtin:target", "builtin:draft") as running:
        completions = await asyncio.gather(
            *(running.client.complete(GenerationRequest(UserMessage(prompt), max_new_tokens=120)) for prompt in PROMPTS)
        )
    usages = [completion.finish.usage for completion in completions]
    acceptance = sum(usage.accepted_count for usage in usages) / sum(usage.drafted_count for usage in usages)
    assert acceptance >= 0.6


def shared_requests(seed: int) -> list[tuple[tuple[int, ...], int]]:
    """Return the prompts of `requests`, most of them behind one of two beginnings."""
    rng = random.Random(seed)
    openings = [tuple(rng.randrange(8, VOCABULARY_SIZE) for _ in range(length)) for length in (0, 37, 90)]
    return [(openings[number % 3] + prompt, limit) for number, (prompt, limit) in enumerate(requests(seed))]


TIGHT = {"paged": "160KiB", "dense": "450KiB"}
"""Memory for about two of the longest sequences, so that others are preempted."""


CACHES = {
    "pages of 1": EngineOptions(page_tokens=1),
    "pages of 16": EngineOptions(page_tokens=16),
    "no sharing": EngineOptions(page_tokens=16, prefix_sharing=False),
    "pages of 40, chunks of 24": EngineOptions(page_tokens=40, prefill_chunk_tokens=24),
    "dense": EngineOptions(layout="dense"),
    "strict": EngineOptions(numerics="strict"),
    "fixed shapes": EngineOptions(),
}
SAMPLED_CACHES = ("strict", "fixed shapes")
"""Caches for families after the first in the sample: those that a family's own layers may affect."""


def cache_case(family: str, name: str, memory: str) -> Any:
    is_first = family == FAMILIES[0]
    is_sampled = is_first or name in SAMPLED_CACHES if memory == "tight" else is_first and name == "pages of 16"
    return sampled(family, name, memory, is_sampled=is_sampled)


@pytest.mark.parametrize(
    ("family", "name", "memory"),
    [cache_case(family, name, memory) for family in FAMILIES for name in CACHES for memory in ("ample", "tight")],
)
async def test_every_cache_equals_hugging_face(
    family: str, name: str, memory: str, pairs: dict[str, PairOfCheckpoints]
) -> None:
    pair, options = pairs[family], CACHES[name]
    prompts = shared_requests(seed=6)
    expected = expected_outputs(str(pair.target))
    options = replace(options, kv_memory="64MiB" if memory == "ample" else TIGHT[options.layout])
    with loading(fixed_shapes=name == "fixed shapes"):
        async with cluster(pair.target, pair.draft, options=options) as running:
            for draft_count in (0, 5):
                outputs, _ = await generate(running, prompts, draft_count)
                assert outputs == expected, f"{draft_count} drafts"
            description = await running.client.describe()
            held = running.target.describe().cache
    assert (description.statistics.preemption_count > 0) == (memory == "tight")
    can_share = options.layout == "paged" and options.prefix_sharing
    # In tight memory a beginning may be gone before the next request with it comes: that is a matter of time.
    assert held.shared_token_count > 0 if can_share and memory == "ample" else can_share or not held.shared_token_count
    assert (held.realigned_bytes > 0) == (options.layout == "dense")
    assert running.held_sequence_count == 0


async def test_sequences_that_outgrow_the_attention_of_short_ones_equal_hugging_face(
    pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_attention, "MAX_LENGTH", 60)
    pair = pairs["Llama"]
    expected = expected_outputs(str(pair.target))
    async with cluster(pair.target, pair.draft) as running:
        outputs, _ = await generate(running, shared_requests(seed=6), 5)
    assert outputs == expected


@pytest.mark.parametrize(
    ("policy", "lanes", "layout"),
    [
        sampled("continuous", 1, "paged", is_sampled=True),
        sampled("continuous", 2, "paged", is_sampled=False),
        sampled("continuous", 2, "dense", is_sampled=False),
        sampled("exspec", None, "paged", is_sampled=True),
        sampled("exspec", None, "dense", is_sampled=False),
        sampled("eqspec", None, "dense", is_sampled=True),
    ],
)
async def test_every_policy_equals_hugging_face_with_every_draft_length(
    policy: PolicyName,
    lanes: int | None,
    layout: Layout,
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    pair = pairs["Llama"]
    expected = expected_outputs(str(pair.target))
    options = EngineOptions(kv_memory="64MiB", layout=layout)
    draft_counts: tuple[int | Literal["auto"], ...] = (0, 3, "auto")
    for draft_count in draft_counts:
        async with cluster(
            pair.target, pair.draft, batch_size=4, draft_count=draft_count, policy=policy, lanes=lanes, options=options
        ) as running:
            outputs, _ = await generate(running, shared_requests(seed=6), None)
            assert outputs == expected, f"draft count {draft_count}"
        assert running.held_sequence_count == 0


async def test_a_cache_for_4_serves_32(pairs: dict[str, PairOfCheckpoints]) -> None:
    pair = pairs["Qwen3"]
    rng = random.Random(8)
    prompts = [(tuple(rng.randrange(8, VOCABULARY_SIZE) for _ in range(80)), 16) for _ in range(32)]
    reference = HuggingFaceReference(str(pair.target), "float32")
    # 96 tokens of 512 bytes each need 6 pages of 16; the prompts have nothing in common to share.
    options = EngineOptions(kv_memory=str(4 * 6 * 16 * 512))
    async with cluster(pair.target, pair.draft, options=options) as running:
        outputs, _ = await generate(running, prompts, draft_count=5)
        assert (await running.client.describe()).statistics.preemption_count > 0
    assert outputs == [reference.generate(prompt, limit) for prompt, limit in prompts]


@cache
def greedy_outputs(target: str, requests: Requests, seed: int) -> list[list[int]]:
    """Return Hugging Face's outputs for what `requests` gives with this seed."""
    reference = HuggingFaceReference(target, "float32")
    return [reference.generate(prompt, limit) for prompt, limit in requests(seed)]


def expected_outputs(target: str) -> list[list[int]]:
    return greedy_outputs(target, shared_requests, seed=6)


async def test_an_unrelated_draft_changes_nothing(pairs: dict[str, PairOfCheckpoints]) -> None:
    target = pairs["Llama"].target
    async with cluster(target, pairs["Qwen3"].target, batch_size=4) as running:
        outputs, usages = await generate(running, requests(seed=4), draft_count=5)
    assert outputs == greedy_outputs(str(target), requests, seed=4)
    assert sum(usage.accepted_count for usage in usages) < 0.2 * sum(usage.drafted_count for usage in usages)
