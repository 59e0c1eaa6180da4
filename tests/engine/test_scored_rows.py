"""Rows whose own tokens are scored: the values are the model's, however the tokens come and whoever comes with them."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.engine.loading import load_model
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.runner import Runner
from paceline.errors import InvalidRequest, NoChoice
from paceline.types import GREEDY, GenerationRequest, Prefilled, TokenIds, TokenLogprobs, Verdict, VerifyRow
from target_service.verifier import Verifier
from tests.checkpoints import FAMILIES
from tests.clusters import cluster
from tests.conftest import PairOfCheckpoints
from tests.engine.test_no_choice import POISON, BadAfterPoison

_RANDOM = random.Random(2)
PROMPT = tuple(_RANDOM.randrange(8, 300) for _ in range(150))
DRAFTED = (9, 9, 9)
OPTIONS = EngineOptions(kv_memory="16MiB", prefill_chunk_tokens=64)
NEIGHBOURS = (
    VerifyRow("decoding", 0, PROMPT[:9], (5, 6, 7)),
    VerifyRow("same prompt", 0, PROMPT, ()),
    VerifyRow("scored too", 0, PROMPT[20:120], (), top_logprob_count=1, scores_tokens=True),
    *(VerifyRow(f"short {n}", 0, (n, *PROMPT[:n]), ()) for n in range(10, 14)),
)


def scored(
    verifier: Verifier, top_count: int, part: int = 1000, neighbours: Sequence[VerifyRow] = ()
) -> tuple[list[TokenLogprobs], Verdict]:
    """Have the prompt scored, in rows of `part` tokens; return the values and the rest of the verdict."""
    scores: list[TokenLogprobs] = []
    while True:
        token_ids = PROMPT[len(scores) : len(scores) + part]
        left = len(PROMPT) - len(scores) - len(token_ids)
        drafted = () if left else DRAFTED
        row = VerifyRow("scored", len(scores), token_ids, drafted, GREEDY, top_count, left, scores_tokens=True)
        # The neighbours begin anew with every call, so the row comes first: the first one always gets on.
        outcome = verifier.verify([row, *neighbours])[0]
        assert isinstance(outcome, Verdict | Prefilled)
        scores += outcome.token_logprobs
        if isinstance(outcome, Verdict):
            return scores, replace(outcome, token_logprobs=())
        assert outcome.cached_length == len(scores), "the next row goes on where this one ended"


def fresh(model: LoadedModel, options: EngineOptions = OPTIONS) -> Verifier:
    return Verifier(Runner(model, options))


@pytest.mark.parametrize("top_count", [0, 5, 20])
@pytest.mark.parametrize("neighbours", [(), NEIGHBOURS], ids=["alone", "among others"])
def test_values_are_those_of_the_models_own_forward(
    top_count: int, neighbours: Sequence[VerifyRow], pairs: dict[str, PairOfCheckpoints]
) -> None:
    folder = str(pairs["Llama"].target)
    scores, verdict = scored(fresh(load_model(folder)), top_count, neighbours=neighbours)
    with torch.inference_mode():
        module = AutoModelForCausalLM.from_pretrained(folder)
        logprobs = module(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert (DRAFTED[0] if verdict.accepted_count else verdict.next_token_id) == logprobs[-1].argmax()
    assert len(scores) == len(PROMPT) - 1
    for token_id, score, row in zip(PROMPT[1:], scores, logprobs, strict=False):
        assert score.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        top = row.topk(top_count)
        assert [one for one, _ in score.top] == top.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_values_are_the_same_to_the_last_bit_whatever_the_chunk_and_the_neighbours(
    family: str, pairs: dict[str, PairOfCheckpoints]
) -> None:
    model = load_model(str(pairs[family].target), "bfloat16")
    expected = scored(fresh(model, replace(OPTIONS, prefill_chunk_tokens=512)), 5)
    for chunk, part, neighbours in ((64, 1000, ()), (7, 50, ()), (64, 64, NEIGHBOURS), (1, 17, ())):
        assert scored(fresh(model, replace(OPTIONS, prefill_chunk_tokens=chunk)), 5, part, neighbours) == expected


@pytest.mark.parametrize(
    "changes", [{"layout": "dense"}, {"page_tokens": 1}, {"page_tokens": 40}, {"prefix_sharing": False}]
)
def test_values_do_not_depend_on_how_the_cache_is_laid_out(
    changes: dict[str, Any], pairs: dict[str, PairOfCheckpoints]
) -> None:
    model = load_model(str(pairs["Llama"].target))
    expected, _ = scored(fresh(model), 0)
    found, _ = scored(fresh(model, replace(OPTIONS, **changes)), 0, neighbours=NEIGHBOURS)
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)


def test_plain_rows_choose_the_same_beside_scored_ones_and_a_scored_row_as_a_plain_one(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    model = load_model(str(pairs["Llama"].target), "bfloat16")
    _, scored_too = scored(fresh(model, replace(OPTIONS, prefill_chunk_tokens=512)), 0)
    (plain,) = fresh(model, replace(OPTIONS, prefill_chunk_tokens=512)).verify([VerifyRow("a", 0, PROMPT, DRAFTED)])
    assert replace(scored_too, logprobs=()) == plain


def test_a_scored_row_takes_nothing_over_and_others_take_over_from_it(pairs: dict[str, PairOfCheckpoints]) -> None:
    verifier = fresh(load_model(str(pairs["Llama"].target)), replace(OPTIONS, prefill_chunk_tokens=512))
    verifier.verify([VerifyRow("earlier", 0, PROMPT[:60], ())])
    scores, _ = scored(verifier, 0)
    assert len(scores) == len(PROMPT) - 1
    assert verifier.runner.describe().cache.shared_token_count == 0
    verifier.verify([VerifyRow("later", 0, PROMPT, ())])
    assert verifier.runner.describe().cache.shared_token_count == 144


def test_a_call_makes_logits_of_a_bounded_number_of_scored_tokens(
    pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(pairs["Llama"].target))
    monkeypatch.setattr("paceline.engine.placing.SCORED_LOGITS", 40 * model.description.vocabulary_size)
    verifier = fresh(model)
    rows = [
        VerifyRow(name, 0, PROMPT, (), top_logprob_count=0, scores_tokens=name != "plain")
        for name in ("first", "plain", "second", "third")
    ]
    outcomes = verifier.verify(rows)
    assert sum(len(one.token_logprobs) for one in outcomes if isinstance(one, Prefilled)) == 40
    assert isinstance(outcomes[0], Prefilled)
    assert outcomes[0].cached_length >= 10, "the first is always served"
    expected, _ = scored(fresh(model), 3)
    for found, score in zip(scored(verifier, 3)[0], expected, strict=True):
        assert found.logprob == pytest.approx(score.logprob, abs=1e-5)


def test_a_row_whose_scores_are_no_numbers_fails_alone(pairs: dict[str, PairOfCheckpoints]) -> None:
    model = load_model(str(pairs["Llama"].target))
    verifier = fresh(replace(model, decoder=BadAfterPoison(model.decoder)))
    row = VerifyRow("poisoned", 0, (9, POISON, 11, 12), (), top_logprob_count=0, scores_tokens=True)
    poisoned, clean = verifier.verify([row, replace(row, sequence_id="clean", token_ids=(9, 11, 12))])
    assert isinstance(poisoned, NoChoice)
    assert "position 2" in poisoned.message
    assert isinstance(clean, Verdict)
    assert all(math.isfinite(one.logprob) for one in clean.token_logprobs)
    assert verifier.runner.cache.length("poisoned") == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"top_logprob_count": None}, "top_logprob_count"), ({"token_ids": (9,), "following_count": 4}, "token_ids")],
)
def test_a_scored_row_that_cannot_be_answered_is_refused(
    changes: dict[str, Any], field: str, pairs: dict[str, PairOfCheckpoints]
) -> None:
    row = VerifyRow("a", 0, (9, 10), (), top_logprob_count=0, scores_tokens=True)
    (refused,) = fresh(load_model(str(pairs["Llama"].target))).verify([replace(row, **changes)])
    assert isinstance(refused, InvalidRequest)
    assert refused.field == field


async def test_a_client_gets_the_prompt_with_its_scores_and_the_same_output(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    pair = pairs["Llama"]
    request = GenerationRequest(TokenIds(PROMPT), 12, top_logprob_count=5, completion_count=2, ignore_end_tokens=True)
    options = replace(OPTIONS, prefill_chunk_tokens=32)
    async with cluster(pair.target, pair.draft, options=options) as running:
        plain = await running.client.complete_all(request)
        pieces = [piece async for piece in running.client.generate(replace(request, echo_prompt=True))]
    first, *later = pieces
    assert [token.token_id for token in first.prompt_tokens] == [*PROMPT]
    assert not first.tokens
    assert not any(piece.prompt_tokens for piece in later)
    for index, whole in enumerate(plain):
        tokens = [token for piece in later if piece.completion_index == index for token in piece.tokens]
        assert [token.token_id for token in tokens] == whole.token_ids
    expected, _ = scored(fresh(load_model(str(pair.target))), 5)
    assert first.prompt_tokens[0].logprobs is None
    for token, score in zip(first.prompt_tokens[1:], expected, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(score.logprob, abs=1e-4)
        assert [one for one, _ in token.logprobs.top] == [one for one, _ in score.top]
