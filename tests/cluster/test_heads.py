"""Outputs are the target's own, whether its heads draft or not."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoConfig

from paceline.engine.calls import Call
from paceline.engine.heads.reading import new_heads, write_heads
from paceline.engine.options import EngineOptions
from paceline.errors import PacelineError
from paceline.types import (
    DraftingOptions,
    DraftSource,
    GenerationRequest,
    SamplingParameters,
    TokenIds,
    VerifyOutcome,
    VerifyRow,
)
from target_service.verifier import Verifier
from tests.cluster.test_exactness import expected_outputs, generate, shared_requests
from tests.clusters import Cluster, cluster
from tests.conftest import PairOfCheckpoints
from tests.heads import KINDS, write_random_heads

OPTIONS = EngineOptions(kv_memory="64MiB")
TIGHT = EngineOptions(kv_memory="240KiB")
"""Memory for about two of the longest sequences with layers of heads, so that others are preempted."""


SAMPLED = [
    replace(GenerationRequest(TokenIds((9, 10, 11 + seed)), 40, sampling=sampling), seed=seed)
    for seed, sampling in enumerate(
        [
            SamplingParameters(temperature=0.7),
            SamplingParameters(temperature=1.0, top_p=0.9),
            SamplingParameters(temperature=0.8, repetition_penalty=1.3),
            SamplingParameters(temperature=1.5, top_k=20),
        ]
        * 2
    )
]
ONLY_HEADS = DraftingOptions((DraftSource.HEADS,))


async def sampled_outputs(running: Cluster, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    return [one.token_ids for one in await asyncio.gather(*map(running.client.complete, requests))]


@pytest.mark.parametrize(
    ("family", "kind", "batch_size", "options", "draft_count"),
    [
        *(("Llama", kind, 8, OPTIONS, 5) for kind in KINDS),
        pytest.param("Llama", "eagle", 1, OPTIONS, "auto", marks=pytest.mark.long),
        ("Llama", "eagle", 8, TIGHT, 5),
        ("Llama", "clover", 8, replace(TIGHT, numerics="strict"), "auto"),
        ("Qwen3", "clover2", 8, OPTIONS, 5),
        pytest.param("Glm4", "eagle", 8, OPTIONS, 5, marks=pytest.mark.long),
    ],
    ids=[*KINDS, "alone", "preempted", "strict", "Qwen3", "Glm4"],
)
async def test_heads_change_no_output(
    family: str,
    kind: str,
    batch_size: int,
    options: EngineOptions,
    draft_count: int | Literal["auto"],
    pairs: dict[str, PairOfCheckpoints],
    tmp_path: Path,
) -> None:
    pair = pairs[family]
    heads = write_random_heads(tmp_path / "heads", kind, pair.target)
    async with cluster(
        pair.target, pair.draft, batch_size=batch_size, options=options, draft_count=draft_count, heads=heads
    ) as running:
        outputs, _ = await generate(running, shared_requests(seed=6), None)
        assert outputs == expected_outputs(str(pair.target))
        plain = await sampled_outputs(running, [replace(one, max_draft_count=0) for one in SAMPLED])
        drafted = [replace(one, drafting=ONLY_HEADS) for one in SAMPLED]
        assert await sampled_outputs(running, drafted) == plain
        description = await running.client.describe()
    # `auto` may find that random heads are not worth it.
    assert draft_count == "auto" or DraftSource.HEADS in {one.source for one in description.statistics.sources}
    assert (description.target.heads, description.target.heads_draft_count) == (kind, 3)
    assert (description.statistics.preemption_count > 0) == (options.kv_memory == TIGHT.kv_memory)
    assert running.held_sequence_count == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_in_strict_bfloat16_outputs_are_those_of_a_target_without_heads(
    kind: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    pair = pairs["Llama"]
    strict = replace(OPTIONS, numerics="strict")
    requests = [*SAMPLED[:4], *(replace(one, sampling=SamplingParameters()) for one in SAMPLED[4:])]
    async with cluster(pair.target, pair.draft, options=strict, dtype="bfloat16") as running:
        plain = await sampled_outputs(running, [replace(one, max_draft_count=0) for one in requests])
    heads = write_random_heads(tmp_path / "heads", kind, pair.target)
    async with cluster(pair.target, pair.draft, options=strict, dtype="bfloat16", heads=heads) as running:
        assert await sampled_outputs(running, [replace(one, drafting=ONLY_HEADS) for one in requests]) == plain


@pytest.mark.parametrize("kind", KINDS)
async def test_a_target_that_loses_everything_loses_drafts_alone(
    kind: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fifth call meets a target as after a restart: without caches, and without what its heads knew."""
    verify, numbers = Verifier.verify_calls, count(1)

    def forgetful(self: Verifier, calls: Sequence[Call[VerifyRow]]) -> list[list[VerifyOutcome | PacelineError]]:
        if next(numbers) % 5 == 0:
            for call in calls:
                self.runner.release([row.sequence_id for row in call.rows], call.caller.scope)
        return verify(self, calls)

    monkeypatch.setattr(Verifier, "verify_calls", forgetful)
    pair = pairs["Llama"]
    heads = write_random_heads(tmp_path / "heads", kind, pair.target)
    async with cluster(pair.target, pair.draft, heads=heads) as running:
        outputs, _ = await generate(running, shared_requests(seed=6), None)
        assert outputs == expected_outputs(str(pair.target))
    assert running.held_sequence_count == 0


async def test_heads_that_are_right_are_accepted(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> None:
    """Medusa's heads do nothing at first: they repeat the target's choice, which is right where a text repeats."""
    target = pairs["Llama"].target
    config = AutoConfig.from_pretrained(target)
    heads = new_heads("medusa", config, draft_count=3)
    with torch.no_grad():
        heads.norm.weight.copy_(torch.ones_like(heads.norm.weight))
    write_heads(heads, config, tmp_path / "heads")
    biased = SamplingParameters(logit_bias=((9, 1000.0),))
    request = GenerationRequest(TokenIds((9, 10, 11)), 40, sampling=biased, ignore_end_tokens=True)
    request = replace(request, drafting=ONLY_HEADS)
    async with cluster(target, pairs["Llama"].draft, heads=tmp_path / "heads") as running:
        completion = await running.client.complete(request)
    (usage,) = completion.finish.usage.sources
    assert completion.token_ids == [9] * 40
    assert (usage.source, usage.accepted_count) == (DraftSource.HEADS, usage.drafted_count)
    assert completion.finish.usage.round_count <= 12
