"""Logits without a choice: they fail only their own row, where plain decoding would have failed."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from draft_service.drafter import Drafter
from paceline.client import Completion
from paceline.engine.interfaces import Attention
from paceline.engine.loading import load_model
from paceline.engine.model.decoder import Decoder
from paceline.engine.options import EngineOptions
from paceline.engine.runner import Runner
from paceline.engine.sampling import Choosing, choose
from paceline.errors import InvalidRequest, NoChoice, PacelineError
from paceline.types import (
    GREEDY,
    ChoiceRule,
    GenerationRequest,
    Proposal,
    ProposeRow,
    SamplingParameters,
    TokenIds,
    Verdict,
    VerifyRow,
)
from target_service.verifier import Verifier
from tests.clusters import Cluster, cluster
from tests.conftest import PairOfCheckpoints
from tests.fakes.device_kernels import loading

pytestmark = pytest.mark.review  # review B2

END = 7
RULES = {
    "greedy": GREEDY,
    "greedy with a bias": ChoiceRule(SamplingParameters(logit_bias=((4, 1.0),))),
    "greedy with penalties": ChoiceRule(SamplingParameters(repetition_penalty=1.3, frequency_penalty=0.2)),
    "sampled": ChoiceRule(SamplingParameters(1), seed=3),
    "top-k": ChoiceRule(SamplingParameters(1, top_k=4), seed=3),
    "top-p": ChoiceRule(SamplingParameters(1, top_p=0.5), seed=3),
    "min-p": ChoiceRule(SamplingParameters(1, min_p=0.2), seed=3),
    "all filters": ChoiceRule(SamplingParameters(0.7, top_k=9, top_p=0.9, min_p=0.1), seed=3),
    "no end yet": ChoiceRule(SamplingParameters(1, min_new_tokens=9), seed=3, end_token_ids=(END,)),
}
PREFIX = (1, 2, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("token_id", [0, END, 39])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_one_bad_logit_fails_its_own_position_only(rule: ChoiceRule, token_id: int, value: float) -> None:
    torch.manual_seed(2)
    clean = [Choosing(torch.randn(3, 40), rule, PREFIX, (4, 5)) for _ in range(3)]
    expected = choose(clean)
    broken = clean[1].logits.clone()
    broken[1, token_id] = value
    found = choose([clean[0], Choosing(broken, rule, PREFIX, (4, 5)), clean[2]])
    assert [found[0], found[2]] == [expected[0], expected[2]]
    assert [found[1][0], found[1][2]] == [expected[1][0], expected[1][2]]
    error = found[1][1]
    assert isinstance(error, NoChoice)
    assert "position 4" in error.message


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_logits_that_are_bad_throughout_fail_their_own_row_only(rule: ChoiceRule, value: float) -> None:
    clean = Choosing(torch.arange(80.0).view(2, 40), rule, PREFIX, (4,))
    found = choose([Choosing(torch.full((2, 40), value), rule, PREFIX, (4,)), clean])
    assert all(isinstance(one, PacelineError) for one in found[0])
    assert found[1] == choose([clean])[0]


def test_a_rule_that_leaves_no_token_is_told_apart_from_a_model_that_leaves_none() -> None:
    logits = torch.full((1, 40), -math.inf)
    assert isinstance(choose([Choosing(logits, RULES["sampled"], PREFIX)])[0][0], NoChoice)
    logits[0, END] = 1.0
    refused = choose([Choosing(logits, RULES["no end yet"], PREFIX)])[0][0]
    assert isinstance(refused, InvalidRequest)
    assert refused.field == "sampling.min_new_tokens"
    assert choose([Choosing(logits, RULES["sampled"], PREFIX)]) == [[END]]


POISON = 13
OPTIONS = {
    "fast": EngineOptions(kv_memory="1MiB", page_tokens=4),
    "strict": EngineOptions(kv_memory="1MiB", page_tokens=4, numerics="strict"),
}
WAYS = [
    pytest.param(OPTIONS["fast"], True, id="fixed shapes"),
    *(pytest.param(one, False, id=name) for name, one in OPTIONS.items()),
]
"""Options, and whether short passes have fixed shapes."""
SAMPLED = ChoiceRule(SamplingParameters(temperature=0.8), seed=5)
FORCED = ChoiceRule(SamplingParameters(logit_bias=((POISON, 1000.0),)))


class BadAfterPoison:
    """A decoder whose logits right after one token are not numbers."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.kernels, self.is_row_independent = decoder.kernels, decoder.is_row_independent
        self.shares_work = decoder.shares_work

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        logits = self._decoder.logits(token_ids, positions, wanted, attention)
        logits[token_ids[0, wanted] == POISON] = math.nan
        return logits


@pytest.mark.parametrize(("options", "fixed_shapes"), WAYS)
def test_a_verified_row_fails_alone_and_only_where_plain_decoding_would(
    options: EngineOptions, fixed_shapes: bool, pairs: dict[str, PairOfCheckpoints]
) -> None:
    with loading(fixed_shapes=fixed_shapes):
        model = load_model(str(pairs["Llama"].target))
    verifier = Verifier(Runner(replace(model, decoder=BadAfterPoison(model.decoder)), options))
    clean = [VerifyRow("greedy", 0, (9, 10, 11), (30, 31)), VerifyRow("sampled", 0, (20, 21), (22,), SAMPLED)]
    alone = [verifier.verify([row])[0] for row in clean]
    assert all(isinstance(one, Verdict) for one in alone)
    broken = [
        VerifyRow("broken", 0, (9, 11, POISON), (30,)),
        VerifyRow("broken, sampled", 0, (POISON,), (), SAMPLED),
        VerifyRow("rejected", 0, (9, 10, 11), (30, POISON)),
        VerifyRow("accepted", 0, (9, 10, 11), (POISON, POISON), FORCED, top_logprob_count=0),
    ]
    found = verifier.verify([clean[0], broken[0], broken[2], clean[1], broken[1], broken[3]])
    assert [found[0], found[3]] == alone
    assert isinstance(found[1], NoChoice)
    assert isinstance(found[4], NoChoice)
    assert verifier.runner.cache.length("broken") == 0
    # Bad logits after a rejected draft affect no output, and an accepted draft comes before the error.
    assert found[2] == alone[0]
    accepted = found[5]
    assert isinstance(accepted, Verdict)
    assert (accepted.accepted_count, accepted.next_token_id, accepted.cached_length) == (0, POISON, 3)
    assert len(accepted.logprobs) == 1
    assert isinstance(verifier.verify([VerifyRow("accepted", 3, (POISON,), (), FORCED)])[0], NoChoice)
    assert verifier.runner.cache.length("accepted") == 3


Poisoned = Callable[[int], Path]


@pytest.fixture(scope="module")
def poisoned(pairs: dict[str, PairOfCheckpoints], tmp_path_factory: pytest.TempPathFactory) -> Poisoned:
    """Write a target with one token whose embedding is not a number: nothing after that token has logits."""

    def write(token_id: int) -> Path:
        folder = tmp_path_factory.mktemp("poisoned")
        module = LlamaForCausalLM.from_pretrained(pairs["Llama"].target)
        with torch.no_grad():
            module.model.embed_tokens.weight[token_id] = math.nan
        module.save_pretrained(folder)
        return folder

    return write


@pytest.mark.parametrize("rule", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("options", "fixed_shapes"), WAYS)
def test_a_row_s_drafts_end_where_no_token_can_be_chosen(
    options: EngineOptions,
    fixed_shapes: bool,
    rule: ChoiceRule,
    pairs: dict[str, PairOfCheckpoints],
    poisoned: Poisoned,
) -> None:
    clean = [ProposeRow("one", 0, (9, 10, 11), 4, rule), ProposeRow("other", 0, (20, 21), 4, rule)]
    half_way = ProposeRow("half way", 0, (40, 41, 42), 4, rule)

    def drafter_of(model: Path) -> Drafter:
        with loading(fixed_shapes=fixed_shapes):
            return Drafter(Runner(load_model(str(model)), options))

    healthy = drafter_of(pairs["Llama"].target)
    first, second, third = healthy.propose([*clean, half_way])
    assert isinstance(first, Proposal) and isinstance(second, Proposal) and isinstance(third, Proposal)
    met = third.draft_token_ids[1]
    assert met not in {*first.draft_token_ids, *second.draft_token_ids, third.draft_token_ids[0]}
    drafter = drafter_of(poisoned(met))
    found = drafter.propose([clean[0], ProposeRow("at once", 0, (met, 8), 4, rule), half_way, clean[1]])
    assert [found[0], found[3]] == [first, second]
    assert found[1] == Proposal((), 1)
    made = found[2]
    assert made == Proposal(third.draft_token_ids[:2], 4)
    # The cached length equals the one reported to the caller.
    following = ProposeRow("half way", made.cached_length, (met, 5), 1, rule)
    assert isinstance(drafter.propose([following])[0], Proposal)


@pytest.mark.parametrize(("options", "fixed_shapes"), WAYS)
def test_what_is_cached_of_a_broken_row_reaches_no_other_one(
    options: EngineOptions, fixed_shapes: bool, poisoned: Poisoned
) -> None:
    # review B3, and "no row's inf reaches another's output"
    with loading(fixed_shapes=fixed_shapes):
        verifier = Verifier(Runner(load_model(str(poisoned(POISON))), options))
    clean = VerifyRow("clean", 0, (20, 21, 22, 23), (24, 25))
    alone = verifier.verify([clean])
    assert isinstance(alone[0], Verdict)
    verifier.runner.release(["clean"])
    broken = VerifyRow("broken", 0, (9, POISON, 11), (30,))
    together = verifier.verify([broken, clean])
    assert isinstance(together[0], NoChoice)
    assert together[1:] == alone
    # Both rows' pages are free now, and another sequence takes one of them.
    verifier.runner.release(["broken", "clean"])
    assert verifier.verify([clean]) == alone


PROMPTS = ((9, 10, 11), (20, 21, 22, 23), (POISON, 30, 31), (40, 41))


async def outputs(running: Cluster, rule: ChoiceRule) -> list[Completion | BaseException]:
    requests = [GenerationRequest(TokenIds(one), 12, sampling=rule.sampling, seed=rule.seed) for one in PROMPTS]
    return await asyncio.gather(*map(running.client.complete, requests), return_exceptions=True)


def tokens(completions: Sequence[Completion | BaseException]) -> list[list[int] | None]:
    return [None if isinstance(one, BaseException) else one.token_ids for one in completions]


async def test_a_request_without_logits_fails_alone_and_a_draft_without_any_costs_no_output(
    pairs: dict[str, PairOfCheckpoints], poisoned: Poisoned
) -> None:
    target, broken = pairs["Llama"].target, poisoned(POISON)
    async with cluster(target, broken) as running:
        drafted = [await outputs(running, rule) for rule in (GREEDY, SAMPLED)]
    async with cluster(target, target) as running:
        expected = [tokens(await outputs(running, rule)) for rule in (GREEDY, SAMPLED)]
    assert [tokens(one) for one in drafted] == expected
    async with cluster(broken, target) as running:
        for rule, right in zip((GREEDY, SAMPLED), expected, strict=True):
            found = await outputs(running, rule)
            assert isinstance(found[2], NoChoice)
            assert tokens(found) == [*right[:2], None, right[3]]
