"""Outputs are the target's own, whether its heads draft or not."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoConfig

from paceline.engine.heads.reading import new_heads, write_heads
from paceline.engine.options import EngineOptions
from paceline.types import DraftingOptions, DraftSource, GenerationRequest, SamplingParameters, TokenIds
from tests.cluster.test_exactness import expected_outputs, generate, shared_requests
from tests.clusters import cluster
from tests.conftest import PairOfCheckpoints
from tests.heads import KINDS, write_random_heads

OPTIONS = EngineOptions(kv_memory="64MiB")
TIGHT = EngineOptions(kv_memory="240KiB")
"""Memory for about two of the longest sequences with layers of heads, so that others are preempted."""


@pytest.mark.parametrize(
    ("kind", "batch_size", "options", "draft_count"),
    [
        *((kind, 8, OPTIONS, 5) for kind in KINDS),
        ("eagle", 1, OPTIONS, "auto"),
        ("eagle", 8, TIGHT, 5),
        ("clover", 8, replace(TIGHT, numerics="strict"), "auto"),
    ],
    ids=[*KINDS, "alone", "preempted", "strict"],
)
async def test_heads_change_no_output(
    kind: str,
    batch_size: int,
    options: EngineOptions,
    draft_count: int | Literal["auto"],
    pairs: dict[str, PairOfCheckpoints],
    tmp_path: Path,
) -> None:
    target = pairs["Llama"].target
    heads = write_random_heads(tmp_path / "heads", kind, target)
    asked = GenerationRequest(TokenIds((9, 10, 11)), 40, sampling=SamplingParameters(temperature=0.7), seed=8)
    only_heads = DraftingOptions((DraftSource.HEADS,))
    async with cluster(
        target, pairs["Llama"].draft, batch_size=batch_size, options=options, draft_count=draft_count, heads=heads
    ) as running:
        outputs, _ = await generate(running, shared_requests(seed=6), None)
        assert outputs == expected_outputs(str(target))
        drafted = await running.client.complete(replace(asked, drafting=only_heads))
        plain = await running.client.complete(replace(asked, max_draft_count=0))
        description = await running.client.describe()
    assert drafted.token_ids == plain.token_ids
    assert {one.source for one in drafted.finish.usage.sources} <= {DraftSource.HEADS}
    assert (description.target.heads, description.target.heads_draft_count) == (kind, 3)
    assert (description.statistics.preemption_count > 0) == (options.kv_memory == TIGHT.kv_memory)
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
    request = replace(request, drafting=DraftingOptions((DraftSource.HEADS,)))
    async with cluster(target, pairs["Llama"].draft, heads=tmp_path / "heads") as running:
        completion = await running.client.complete(request)
    (usage,) = completion.finish.usage.sources
    assert completion.token_ids == [9] * 40
    assert (usage.source, usage.accepted_count) == (DraftSource.HEADS, usage.drafted_count)
    assert completion.finish.usage.round_count <= 12
