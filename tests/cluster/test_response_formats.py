"""Outputs that have a format: equal to plain decoding with the same mask, whatever drafts, and valid."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Completion
from paceline.errors import InvalidRequest
from paceline.types import (
    DraftingOptions,
    DraftSource,
    FinishReason,
    GenerationRequest,
    ResponseFormat,
    SamplingParameters,
    Text,
    TokenIds,
)
from tests.checkpoints import write_model, write_related_draft
from tests.cluster.test_exactness import verify_after_preparing
from tests.clusters import Cluster, cluster
from tests.conftest import PairOfCheckpoints
from tests.fakes.device_kernels import loading
from tests.fakes.formats import follows, random_formats
from tests.fakes.tokenizers import byte_tokenizer
from tests.scrapes import value

END = 256
FORMATS = random_formats(4, seed=3)
SAMPLED = SamplingParameters(temperature=0.9)
PROMPT = Text('Write {"a": [1, 2, 3]} or ab.')


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairOfCheckpoints:
    """Write a pair with a tokenizer, whose draft is often right and knows no end token by name."""
    folder = tmp_path_factory.mktemp("formats")
    target = write_model(folder / "target", "Llama", eos_token_id=END)
    draft = write_related_draft(folder / "draft", target, "Llama", noise=0.05)
    return PairOfCheckpoints(with_tokenizer(target), with_tokenizer(draft))


def with_tokenizer(folder: Path) -> Path:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def requests(**changes: Any) -> list[GenerationRequest]:
    return [
        replace(GenerationRequest(PROMPT, 60, seed=7, sampling=sampling, response_format=form), **changes)
        for form in FORMATS
        for sampling in (SamplingParameters(), SAMPLED)
    ]


async def complete(running: Cluster, asked: Sequence[GenerationRequest]) -> list[Completion]:
    return await asyncio.gather(*map(running.client.complete, asked))


async def test_formatted_outputs_equal_plain_decoding_with_the_mask_and_are_valid(pair: PairOfCheckpoints) -> None:
    async with cluster(pair.target, pair.draft, batch_size=1) as running:
        plain = await complete(running, requests(max_draft_count=0))
        assert [one.token_ids for one in await complete(running, requests())] == [one.token_ids for one in plain]
    ended = 0
    for one, request in zip(plain, requests(), strict=True):
        if one.finish.reason is FinishReason.END_TOKEN:
            ended += 1
            assert request.response_format
            assert follows(one.text, request.response_format)
    assert ended > len(plain) / 2
    async with cluster(pair.target, pair.draft, batch_size=8) as running:
        accepted = dict.fromkeys((DraftSource.DRAFT, DraftSource.SUFFIX, DraftSource.PREDICTION), 0)
        for source in accepted:
            asked = [
                replace(one, drafting=DraftingOptions((source,)), predicted_output=Text(whole.text + "xyz"))
                for one, whole in zip(requests(), plain, strict=True)
            ]
            found = await complete(running, asked)
            assert [one.token_ids for one in found] == [one.token_ids for one in plain], source
            accepted[source] += sum(one.finish.usage.accepted_count for one in found)
        assert accepted[DraftSource.DRAFT] > 50
        assert accepted[DraftSource.PREDICTION] > 50
        assert [one.token_ids for one in await complete(running, requests(max_draft_count=0))] == [
            one.token_ids for one in plain
        ]
    assert running.held_sequence_count == 0


async def test_prepared_rounds_and_recorded_passes_change_no_formatted_output(
    pair: PairOfCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(pair.target, pair.draft) as running:
        plain = [one.token_ids for one in await complete(running, requests(max_draft_count=0))]
    verify_after_preparing(monkeypatch)
    async with cluster(pair.target, pair.target) as running:
        assert [one.token_ids for one in await complete(running, requests())] == plain
        assert value(running.registry, "prepared_hits_total") > 0
    monkeypatch.undo()
    with loading(fixed_shapes=True):
        async with cluster(pair.target, pair.draft) as running:
            assert [one.token_ids for one in await complete(running, requests())] == plain


async def test_log_probabilities_stay_the_models_own(pair: PairOfCheckpoints) -> None:
    asked = GenerationRequest(PROMPT, 20, top_logprob_count=1, response_format=ResponseFormat(regex="[ab]{20}"))
    async with cluster(pair.target, pair.draft) as running:
        formatted = await running.client.complete(asked)
        free = await running.client.complete(replace(asked, response_format=None))
    first, other = (one.tokens[0].logprobs for one in (formatted, free))
    assert first is not None
    assert other is not None
    assert first.top == other.top
    assert first.top[0][1] > first.logprob


@pytest.mark.parametrize("vocabulary_size", [257, 400])
async def test_a_draft_with_another_vocabulary_drafts_for_formats(
    vocabulary_size: int, pair: PairOfCheckpoints, tmp_path: Path
) -> None:
    draft = with_tokenizer(write_model(tmp_path / "draft", "Llama", vocab_size=vocabulary_size, eos_token_id=END))
    asked = GenerationRequest(PROMPT, 40, response_format=ResponseFormat(regex="(a|bc){8}x{20}"))
    async with cluster(pair.target, draft) as running:
        plain = await running.client.complete(replace(asked, max_draft_count=0))
        drafted = await running.client.complete(replace(asked, drafting=DraftingOptions((DraftSource.DRAFT,))))
        assert drafted.token_ids == plain.token_ids
        # What is forced is drafted right by any model that has the mask.
        assert drafted.finish.usage.accepted_count >= 15
        assert follows(drafted.text, ResponseFormat(regex="(a|bc){8}x{20}"))


async def test_models_without_a_tokenizer_and_outputs_that_must_be_longer_are_refused(
    pair: PairOfCheckpoints, pairs: dict[str, PairOfCheckpoints]
) -> None:
    asked = GenerationRequest(TokenIds((20, 21)), 9, response_format=ResponseFormat(regex="ab"))
    async with cluster(pairs["Llama"].target, pairs["Llama"].draft) as running:
        with pytest.raises(InvalidRequest, match="response_format is set, and the models have no tokenizer"):
            await running.client.complete(asked)
    async with cluster(pair.target, pair.draft) as running:
        with pytest.raises(InvalidRequest, match="min_new_tokens is 5, but at position 4 response_format allows only"):
            await running.client.complete(replace(asked, sampling=SamplingParameters(min_new_tokens=5)))
        other = replace(asked, response_format=ResponseFormat(json_schema='{"type": "boolean"}'))
        assert (await running.client.complete(other)).text in ("true", "false")
