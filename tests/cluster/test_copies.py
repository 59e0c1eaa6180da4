"""Drafts that no model makes: greedy and sampled tokens are the target's own, whatever text they are copied from."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from paceline.client import Completion
from paceline.types import DraftingOptions, DraftSource, GenerationRequest, SamplingParameters, TokenIds
from tests.clusters import Cluster, cluster
from tests.conftest import PairOfCheckpoints

FEW_TOKENS = tuple((token_id, 40.0) for token_id in (30, 31, 32))
"""Likelier than all others, so that an output repeats itself and its own text is worth copying."""
SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters(logit_bias=FEW_TOKENS),
    SamplingParameters(temperature=0.7),
    SamplingParameters(temperature=0.8, repetition_penalty=1.3),
    SamplingParameters(temperature=1.0, top_p=0.9),
    SamplingParameters(temperature=1.5, logit_bias=FEW_TOKENS),
)
REQUESTS = [
    GenerationRequest(TokenIds((20, 21, 22) * 4), 40, sampling=sampling, seed=seed)
    for seed, sampling in enumerate(SAMPLINGS)
]


async def completions(running: Cluster, requests: Sequence[GenerationRequest]) -> list[Completion]:
    return await asyncio.gather(*map(running.client.complete, requests))


def copying(source: DraftSource) -> list[GenerationRequest]:
    return [replace(one, drafting=DraftingOptions((source,))) for one in REQUESTS]


def predicting(outputs: Sequence[Sequence[int]]) -> list[GenerationRequest]:
    requests = zip(copying(DraftSource.PREDICTION), outputs, strict=True)
    return [replace(one, predicted_output=TokenIds(tuple(output))) for one, output in requests]


@pytest.mark.parametrize(("draft_count", "is_shared"), [(5, False), (5, True), ("auto", True)])
async def test_greedy_and_sampled_tokens_are_the_same_whatever_they_are_copied_from(
    draft_count: int | Literal["auto"],
    is_shared: bool,
    pairs: dict[str, PairOfCheckpoints],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_COORDINATOR_SHARED_SUFFIXES", str(is_shared))
    pair, accepted = pairs["Llama"], []
    async with cluster(pair.target, pair.draft, draft_count=draft_count) as running:
        alone = await completions(running, [replace(one, max_draft_count=0) for one in REQUESTS])
        plain = [one.token_ids for one in alone]
        suffix, wrong = copying(DraftSource.SUFFIX), [output[::-1] for output in plain]
        for requests in (suffix, suffix, predicting(plain), predicting(wrong)):
            found = await completions(running, requests)
            assert [one.token_ids for one in found] == plain
            accepted.append([one.finish.usage.accepted_count for one in found])
    assert len(set(map(tuple, plain))) == len(plain)
    if draft_count != "auto":  # which may find that a copy is not worth its time
        own, again, right, _ = accepted
        assert own[1] > 10 and own[5] > 10
        assert (min(again) > 20) is is_shared
        assert min(right) > 20
