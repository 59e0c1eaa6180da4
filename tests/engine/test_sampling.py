"""The rule of choice: its meaning, the fairness of its noise, and its independence of drafts."""

import asyncio
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator.door.admission import completion_seed
from paceline.engine.sampling import Choosing, choose, filtered, ranked
from paceline.errors import InvalidRequest
from paceline.types import ChoiceRule, GenerationRequest, SamplingParameters, TokenIds
from tests.checkpoints import END_TOKEN_ID, VOCABULARY_SIZE
from tests.clusters import Cluster, cluster
from tests.conftest import PairOfCheckpoints
from tests.fairness import chi_square_p

PROMPT = (9, 10, 11, 12)
FALSE_ALARM = 1e-6
"""Chance that a fair generator fails a statistical test. Fixed seeds make each test fail always or never."""


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(temperature=1),
        SamplingParameters(temperature=0.7, top_k=5),
        SamplingParameters(temperature=1.3, top_p=0.8),
        SamplingParameters(temperature=1, min_p=0.1),
    ],
)
def test_choices_follow_the_filtered_distribution(sampling: SamplingParameters) -> None:
    torch.manual_seed(4)
    logits = torch.randn(1, 12) * 1.5
    expected = filtered(logits / sampling.temperature, sampling).softmax(-1)[0].double()
    draws = 20_000
    counts = Counter(
        choice
        for start in range(0, draws, 100)
        for choice in choose([Choosing(logits.expand(100, -1), ChoiceRule(sampling, seed=start), PROMPT)])[0]
    )
    possible = [token for token in range(12) if expected[token] > 0]
    assert set(counts) <= set(possible)
    weights = torch.stack([expected[token] for token in possible])
    weights /= weights.sum()
    observed = [counts[token] for token in possible]
    assert chi_square_p(observed, (weights * draws).tolist()) > FALSE_ALARM
    assert chi_square_p(observed, [draws / len(possible)] * len(possible)) < FALSE_ALARM


SAMPLINGS = [
    SamplingParameters(temperature=1),
    SamplingParameters(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParameters(temperature=1, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParameters(temperature=0.7, logit_bias=((END_TOKEN_ID, 8.0), (30, 2.0)), min_new_tokens=6),
    SamplingParameters(repetition_penalty=1.2, min_new_tokens=3),
]


async def outputs(running: Cluster, draft_count: int) -> dict[SamplingParameters, list[list[int]]]:
    """Return ten outputs of each of `SAMPLINGS`; all are generated at once, since a round of many takes little more."""

    async def of(sampling: SamplingParameters) -> list[list[int]]:
        requests = [
            GenerationRequest(
                TokenIds(PROMPT[: 1 + number % 4]), 24, sampling=sampling, seed=number, max_draft_count=draft_count
            )
            for number in range(10)
        ]
        return [one.token_ids for one in await asyncio.gather(*map(running.client.complete, requests))]

    return dict(zip(SAMPLINGS, await asyncio.gather(*map(of, SAMPLINGS)), strict=True))


async def test_sampled_tokens_are_the_same_whatever_the_draft(pairs: dict[str, PairOfCheckpoints]) -> None:
    target = pairs["Llama"].target
    async with cluster(target, target, batch_size=16) as running:
        expected = await outputs(running, 0)
    accepted: Counter[str] = Counter()
    drafts = {"like the target": pairs["Llama"].draft, "itself": target, "rubbish": pairs["Qwen3"].target}
    for name, draft in drafts.items():
        async with cluster(target, draft, batch_size=16) as running:
            assert await outputs(running, 4) == expected
            accepted[name] += (await running.client.describe()).statistics.accepted_count
    assert accepted["itself"] > accepted["like the target"] > 2 * accepted["rubbish"]
    # Different seeds give different outputs, and minimum lengths hold.
    assert len({tuple(one) for one in expected[SAMPLINGS[0]]}) == 10
    assert min(len(one) for one in expected[SAMPLINGS[3]]) >= 6


async def test_first_tokens_follow_the_targets_exact_distribution(pairs: dict[str, PairOfCheckpoints]) -> None:
    """Decode two tokens a prompt, the second drafted: both must have the target's marginal, from transformers."""
    pair = pairs["Llama"]
    sampling = SamplingParameters(temperature=0.5, top_k=4)
    draws = 1200
    async with cluster(pair.target, pair.draft, batch_size=64) as running:
        completions = [
            completion
            for start in range(0, draws, 60)
            for completion in await running.client.complete_all(
                GenerationRequest(TokenIds(PROMPT), 2, sampling=sampling, seed=start, completion_count=60)
            )
        ]
    module = AutoModelForCausalLM.from_pretrained(pair.target)
    counts: Counter[tuple[int, ...]] = Counter(tuple(one.token_ids) for one in completions)

    def probabilities(prefix: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            logits = module(input_ids=torch.tensor([prefix])).logits[0, -1:].float()
        return filtered(logits / sampling.temperature, sampling).softmax(-1)[0].double()

    first = probabilities(PROMPT)
    pairs_of_tokens = {
        (one, other): float(first[one] * probabilities((*PROMPT, one))[other])
        for one in first.nonzero().flatten().tolist()
        for other in probabilities((*PROMPT, one)).nonzero().flatten().tolist()
    }
    assert set(counts) <= set(pairs_of_tokens)
    common = [key for key, share in pairs_of_tokens.items() if share * draws >= 5]
    rest = 1 - sum(pairs_of_tokens[key] for key in common)
    observed = [*(counts[key] for key in common), draws - sum(counts[key] for key in common)]
    expected = [*(pairs_of_tokens[key] * draws for key in common), rest * draws]
    assert chi_square_p(observed, expected) > FALSE_ALARM


async def test_completions_of_one_prompt_differ_and_each_can_be_had_again_by_its_seed(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    request = GenerationRequest(
        TokenIds(tuple(range(20, 60))), 16, sampling=SamplingParameters(temperature=1), seed=5, completion_count=4
    )
    async with cluster(pairs["Llama"].target, pairs["Llama"].draft) as running:
        completions = await running.client.complete_all(request)
        assert len({tuple(one.token_ids) for one in completions}) == 4
        told = sum(one.finish.usage.cached_prompt_count for one in completions)
        assert told == running.target.describe().cache.shared_token_count
        for index, completion in enumerate(completions):
            assert completion.finish.seed == completion_seed(5, index)
            again = replace(request, seed=completion.finish.seed, completion_count=1)
            assert (await running.client.complete(again)).token_ids == completion.token_ids
        # Three of four reused the prompt's full pages.
        assert running.target.describe().cache.shared_token_count >= 3 * 32


async def test_a_seed_is_drawn_and_reported_when_none_is_given(pairs: dict[str, PairOfCheckpoints]) -> None:
    request = GenerationRequest(TokenIds(PROMPT), 12, sampling=SamplingParameters(temperature=1))
    async with cluster(pairs["Llama"].target, pairs["Llama"].draft) as running:
        first, second = [await running.client.complete(request) for _ in range(2)]
        assert first.finish.seed != second.finish.seed
        again = await running.client.complete(replace(request, seed=first.finish.seed))
        assert again.token_ids == first.token_ids


async def test_logprobs_are_the_targets_own_at_every_place(pairs: dict[str, PairOfCheckpoints]) -> None:
    pair = pairs["Llama"]
    request = GenerationRequest(
        TokenIds(PROMPT), 12, sampling=SamplingParameters(temperature=0.9), seed=3, top_logprob_count=3
    )
    async with cluster(pair.target, pair.draft) as running:
        completion = await running.client.complete(request)
    module = AutoModelForCausalLM.from_pretrained(pair.target)
    with torch.inference_mode():
        whole = torch.tensor([[*PROMPT, *completion.token_ids]])
        expected = module(input_ids=whole).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    for token, row in zip(completion.tokens, expected, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(row[token.token_id].item(), abs=1e-4)
        assert [one for one, _ in token.logprobs.top] == row.topk(3).indices.tolist()
        assert [value for _, value in token.logprobs.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": 1e-4}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": 2.0}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-3}, "repetition_penalty"),
    ({"presence_penalty": 1e9}, "presence_penalty"),
    ({"frequency_penalty": -1e9}, "frequency_penalty"),
    ({"min_new_tokens": 99}, "min_new_tokens"),
    ({"logit_bias": ((VOCABULARY_SIZE, 1.0),)}, "logit_bias"),
    ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
    ({"logit_bias": ((1, math.inf),)}, "logit_bias"),
]
"""Parameters, and the one of them that is refused."""


async def test_a_parameter_out_of_range_is_refused_by_name(pairs: dict[str, PairOfCheckpoints]) -> None:
    async with cluster(pairs["Llama"].target, pairs["Llama"].draft) as running:
        for changes, field in OUT_OF_RANGE:
            sampling = replace(SamplingParameters(), **changes)
            with pytest.raises(InvalidRequest) as refusal:
                await running.client.complete(GenerationRequest(TokenIds(PROMPT), 20, sampling=sampling))
            assert refusal.value.field == f"sampling.{field}", changes


@pytest.mark.parametrize("temperature", [0, 1])
def test_ranked_tokens_begin_with_the_choice_and_follow_in_the_order_of_their_scores(temperature: float) -> None:
    torch.manual_seed(7)
    rule = ChoiceRule(SamplingParameters(temperature=temperature), seed=3)
    one = Choosing(torch.randn(5, 40), rule, PROMPT)
    (choices,) = choose([one])
    for place, found in zip(choices, ranked([one], 4)[0], strict=True):
        assert found[0].token_id == place
        assert len({token.token_id for token in found}) == 4
        assert [token.probability for token in found] == sorted((token.probability for token in found), reverse=True)


def test_sequences_are_ranked_together_as_they_are_alone() -> None:
    torch.manual_seed(8)
    samplings = [SamplingParameters(temperature=1), SamplingParameters(), SamplingParameters(temperature=0.7, top_k=5)]
    rules = [ChoiceRule(one, seed) for seed, one in enumerate(samplings)]
    sequences = [Choosing(torch.randn(rows, 40), rule, PROMPT) for rows, rule in enumerate(rules, 1)]
    together = ranked(sequences, 4)
    alone = [ranked([one], 4)[0] for one in sequences]
    assert [[[token.token_id for token in place] for place in one] for one in together] == [
        [[token.token_id for token in place] for place in one] for one in alone
    ]
    assert [[place[0].token_id for place in one] for one in together] == choose(sequences)


def test_among_equals_the_first_ranked_token_is_the_choice() -> None:
    one = Choosing(torch.ones(1, 40), ChoiceRule(), PROMPT)
    assert ranked([one], 3)[0][0][0].token_id == choose([one])[0][0]


def test_a_place_without_a_choice_has_no_ranked_tokens() -> None:
    one = Choosing(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]), ChoiceRule(), PROMPT)
    assert [len(place) for place in ranked([one], 2)[0]] == [0, 2]
