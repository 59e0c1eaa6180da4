"""GenerationService over real gRPC: streams, text, stop conditions, cancellation, bad requests."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tokenizers import Tokenizer

from coordinator.door.served import check_pair
from paceline.builtin import resolve_model
from paceline.cli.prompts import PROMPTS
from paceline.client import Client
from paceline.errors import CallTimedOut, IncompatiblePair, InvalidRequest
from paceline.types import FinishReason, GenerationRequest, Text, TokenIds, UserMessage
from tests.clusters import Cluster, cluster
from tests.conftest import PairOfCheckpoints
from tests.fakes.model_services import describe

pytestmark = pytest.mark.slow
TOKENIZER = Tokenizer.from_file(str(resolve_model("builtin:target") / "tokenizer.json"))


@pytest.fixture
async def running() -> AsyncIterator[Cluster]:
    async with cluster("builtin:target", "builtin:draft", batch_size=4) as made:
        yield made


async def settled(running: Cluster) -> None:
    """Wait until no sequence is held anywhere, or the test times out."""
    while running.held_sequence_count or (await running.client.describe()).live_sequence_count:
        await asyncio.sleep(0.01)


async def test_text_forms_of_a_prompt_equal_their_token_ids(running: Cluster) -> None:
    ids = tuple(TOKENIZER.encode(f"<|user|>{PROMPTS[0]}<|assistant|>").ids)
    raw = tuple(TOKENIZER.encode(PROMPTS[0]).ids)
    outputs = [
        (await running.client.complete(GenerationRequest(prompt, max_new_tokens=20))).token_ids
        for prompt in (UserMessage(PROMPTS[0]), TokenIds(ids), Text(PROMPTS[0]), TokenIds(raw))
    ]
    assert outputs[0] == outputs[1] != outputs[2] == outputs[3]


async def test_streamed_text_joins_to_the_decoded_tokens(running: Cluster) -> None:
    completion = await running.client.complete(GenerationRequest(UserMessage(PROMPTS[3]), max_new_tokens=90))
    assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)
    usage = completion.finish.usage
    assert usage.output_count == len(completion.tokens)
    # Each round adds one token of the target's own, unless it ends in an accepted end token.
    assert usage.accepted_count + usage.round_count - usage.output_count in (0, 1)
    assert usage.accepted_count == sum(token.accepted for token in completion.tokens)


async def test_each_stop_condition_ends_the_output_where_plain_decoding_has_it(running: Cluster) -> None:
    prompt = UserMessage(PROMPTS[1])
    whole = await running.client.complete(GenerationRequest(prompt, max_new_tokens=60))
    stop = whole.text[12:15]
    by_string = await running.client.complete(GenerationRequest(prompt, max_new_tokens=60, stop_strings=(stop,)))
    assert by_string.finish.reason is FinishReason.STOP_STRING
    assert by_string.text == whole.text[: whole.text.index(stop)]
    stop_id = whole.token_ids[9]
    by_token = await running.client.complete(GenerationRequest(prompt, max_new_tokens=60, stop_token_ids=(stop_id,)))
    assert by_token.finish.reason is FinishReason.STOP_TOKEN
    assert by_token.token_ids == whole.token_ids[: whole.token_ids.index(stop_id) + 1]
    by_length = await running.client.complete(GenerationRequest(prompt, max_new_tokens=7))
    assert by_length.finish.reason is FinishReason.LENGTH
    assert by_length.token_ids == whole.token_ids[:7]


async def test_going_on_past_the_end_token_is_possible(running: Cluster) -> None:
    prompt = UserMessage(PROMPTS[1])
    ended = await running.client.complete(GenerationRequest(prompt, max_new_tokens=200))
    assert ended.finish.reason is FinishReason.END_TOKEN
    more = len(ended.token_ids) + 10
    longer = await running.client.complete(GenerationRequest(prompt, max_new_tokens=more, ignore_end_tokens=True))
    assert longer.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert len(longer.token_ids) == more


async def test_cancelling_frees_both_caches_and_leaves_others_alone(running: Cluster) -> None:
    request = GenerationRequest(UserMessage(PROMPTS[2]), max_new_tokens=60)
    alone = await running.client.complete(request)
    endless = GenerationRequest(UserMessage(PROMPTS[0]), max_new_tokens=3000, ignore_end_tokens=True)
    other = asyncio.ensure_future(running.client.complete(request))
    stream = running.client.generate(endless)
    await anext(stream)
    await stream.aclose()
    assert (await other).token_ids == alone.token_ids
    await settled(running)


async def test_a_deadline_frees_both_caches(running: Cluster) -> None:
    endless = GenerationRequest(UserMessage(PROMPTS[0]), max_new_tokens=3000, ignore_end_tokens=True)
    with pytest.raises(CallTimedOut):
        await running.client.complete(endless, timeout_s=0.3)
    await settled(running)


async def test_a_client_that_vanishes_frees_both_caches(running: Cluster) -> None:
    async with Client(running.coordinator_address) as other:
        stream = other.generate(GenerationRequest(UserMessage(PROMPTS[0]), max_new_tokens=3000, ignore_end_tokens=True))
        await anext(stream)
    await settled(running)


async def test_bad_requests_are_refused_by_field_and_harm_nobody(running: Cluster) -> None:
    good = GenerationRequest(UserMessage(PROMPTS[4]), max_new_tokens=40)
    expected = await running.client.complete(good)
    under_way = asyncio.ensure_future(running.client.complete(good))
    for request, field in [
        (GenerationRequest(Text("")), "prompt"),
        (GenerationRequest(TokenIds(())), "prompt"),
        (GenerationRequest(TokenIds((4096,))), "prompt.token_ids"),
        (GenerationRequest(TokenIds((5,) * 4096)), "prompt"),
        (GenerationRequest(Text("x"), max_new_tokens=0), "max_new_tokens"),
        (GenerationRequest(Text("x"), max_new_tokens=-1), "max_new_tokens"),
        (GenerationRequest(Text("x"), max_new_tokens=2**31 - 1), "max_new_tokens"),
        (GenerationRequest(Text("x"), max_draft_count=-1), "max_draft_count"),
        (GenerationRequest(Text("x"), stop_strings=("",)), "stop_strings"),
    ]:
        with pytest.raises(InvalidRequest) as refusal:
            await running.client.complete(request)
        assert refusal.value.field == field
    assert (await under_way).token_ids == expected.token_ids


async def test_the_cluster_describes_its_models_and_counts(running: Cluster) -> None:
    usage = (await running.client.complete(GenerationRequest(Text("2 + 2"), max_new_tokens=20))).finish.usage
    described = await running.client.describe()
    assert described.draft is not None
    assert (described.target.model_id, described.draft.model_id) == ("builtin:target", "builtin:draft")
    assert described.target.tokenizer_fingerprint == described.draft.tokenizer_fingerprint != ""
    assert described.statistics.round_count == usage.round_count
    assert described.statistics.accepted_count == usage.accepted_count


async def test_a_pair_with_different_tokenizers_is_refused(pairs: dict[str, PairOfCheckpoints]) -> None:
    with pytest.raises(IncompatiblePair, match="different tokenizers"):
        async with cluster("builtin:target", pairs["Llama"].target):
            pass


def test_pairs_without_tokenizers_need_equal_vocabularies() -> None:
    check_pair(describe("a"), describe("b"))
    with pytest.raises(IncompatiblePair, match="vocabularies differ: 10 and 50"):
        check_pair(describe("a", vocabulary_size=10), describe("b"))
    # Models with one tokenizer and differently padded embeddings are a working pair.
    check_pair(describe("a", "same", vocabulary_size=64), describe("b", "same"))
