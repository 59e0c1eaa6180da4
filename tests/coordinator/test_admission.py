"""Requests that can never be served are refused before they are queued."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from coordinator.door.admission import Admission
from coordinator.door.limits import RequestLimits
from coordinator.door.served import Served
from coordinator.drafting.guessers import Guessers
from coordinator.drafting.shared_suffixes import SharedSuffixes
from coordinator.requests.committed_tokens import CommittedTokens, TokenList
from coordinator.requests.generation import Generation
from paceline.errors import InvalidRequest, PacelineError, PromptTooLong
from paceline.text import TextCodec
from paceline.types import (
    Chat,
    ChatMessage,
    DraftingOptions,
    DraftSource,
    GenerationRequest,
    Prompt,
    ReceivedOutput,
    SamplingParameters,
    Text,
    TokenIds,
    TokenizerFiles,
    UserMessage,
)
from tests.coordinators import SERVED
from tests.fakes.model_services import END_TOKEN_ID, VOCABULARY_SIZE
from tests.fakes.tokenizers import byte_tokenizer, llama_decoder
from tests.tools import built_suffixes


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerationRequest(TokenIds(())), "prompt"),
        (GenerationRequest(TokenIds((5,) * 1000)), "prompt"),
        (GenerationRequest(TokenIds((VOCABULARY_SIZE,))), "prompt.token_ids"),
        (GenerationRequest(TokenIds((5,)), max_new_tokens=0), "max_new_tokens"),
        (GenerationRequest(TokenIds((5,)), max_new_tokens=-3), "max_new_tokens"),
        (GenerationRequest(TokenIds((5,)), max_new_tokens=2**31 - 1), "max_new_tokens"),
        (GenerationRequest(TokenIds((5,)), stop_token_ids=(-1,)), "stop_token_ids"),
        (GenerationRequest(TokenIds((5,)), stop_token_ids=(5,) * 1025), "stop_token_ids"),
        (
            GenerationRequest(
                TokenIds((5,)),
                sampling=SamplingParameters(min_new_tokens=2),
                stop_token_ids=tuple(range(VOCABULARY_SIZE)),
            ),
            "sampling.min_new_tokens",
        ),
        (GenerationRequest(TokenIds((5,)), max_draft_count=-1), "max_draft_count"),
        (GenerationRequest(TokenIds((5,)), stop_strings=("",)), "stop_strings"),
        (GenerationRequest(TokenIds((5,)), stop_strings=("x",) * 17), "stop_strings"),
        (GenerationRequest(TokenIds((5,)), stop_strings=("x" * 1000, "y" * 25)), "stop_strings"),
        (
            GenerationRequest(
                TokenIds((5,)),
                drafting=DraftingOptions(
                    sources=(DraftSource.SUFFIX, DraftSource.DRAFT), forbidden_sources=(DraftSource.SUFFIX,)
                ),
            ),
            "drafting.forbidden_sources",
        ),
        (GenerationRequest(TokenIds((5,)), drafting=DraftingOptions(in_order=True)), "drafting.in_order"),
        (
            GenerationRequest(TokenIds((5,)), predicted_output=TokenIds((VOCABULARY_SIZE,))),
            "predicted_output.token_ids",
        ),
        (GenerationRequest(TokenIds((5,)), 2, predicted_output=TokenIds((5, 6, 7, -1))), "predicted_output.token_ids"),
        (GenerationRequest(TokenIds((5,)), predicted_output=Text("no tokenizer")), "predicted_output"),
        (GenerationRequest(TokenIds((5,)), prompt_time_s=-1), "prompt_time_s"),
        (GenerationRequest(TokenIds((5,)), prompt_time_s=1 << 62), "prompt_time_s"),
    ],
)
def test_a_bad_request_is_refused_by_field(request_: GenerationRequest, field: str) -> None:
    with pytest.raises(PacelineError) as refusal:
        Admission(SERVED, default_max_new_tokens=40).admit(request_)
    assert getattr(refusal.value, "field", None) == field


def resumed(*received: ReceivedOutput, seed: int | None = 1, completion_count: int = 3) -> GenerationRequest:
    return GenerationRequest(
        TokenIds((5, 6)), 10, seed=seed, completion_count=completion_count, received_outputs=received
    )


@pytest.mark.review
def test_each_output_goes_on_after_what_was_received_of_it_and_those_that_ended_are_not_made() -> None:
    """Review C13: only a request for one output could be resumed."""
    received = (ReceivedOutput(2, (7, 8)), ReceivedOutput(1, (), ended=True))
    first, third = Admission(SERVED, default_max_new_tokens=40).admit(resumed(*received)).generations
    assert (first.completion_index, first.token_ids[:]) == (0, [5, 6])
    assert (third.completion_index, third.token_ids[:], third.output.remaining_count) == (2, [5, 6, 7, 8], 8)
    whole = Admission(SERVED, default_max_new_tokens=40).admit(resumed()).generations
    assert [one.seed for one in (first, third)] == [whole[0].seed, whole[2].seed]


async def test_an_output_that_was_received_whole_but_for_its_finish_gets_that() -> None:
    """The other output, which ended, does not affect the end of the stream."""
    request = Admission(SERVED, default_max_new_tokens=40).admit(
        resumed(ReceivedOutput(0, (7, END_TOKEN_ID)), ReceivedOutput(1, ended=True), completion_count=2)
    )
    (piece,) = [piece async for piece in request.stream.pieces()]
    assert (piece.tokens, piece.finish is not None, request.unfinished) == ((), True, [])


@pytest.mark.review
@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (resumed(ReceivedOutput(0, (7,)), seed=None), "seed", "give the seed that the first message"),
        (resumed(ReceivedOutput(3, (7,))), "received_outputs", "names output 3; give 0 to 2"),
        (resumed(ReceivedOutput(-1, (7,))), "received_outputs", "names output -1"),
        (resumed(ReceivedOutput(1, (7,)), ReceivedOutput(1, (7,))), "received_outputs", "names output 1 twice"),
        (resumed(ReceivedOutput(1, (50,))), "received_outputs.token_ids", "holds 50"),
        (resumed(ReceivedOutput(1, (7,) * 11)), "received_outputs", r"11 tokens of output 1.* after 10 \(length\)"),
        (resumed(ReceivedOutput(1, (END_TOKEN_ID, 7))), "received_outputs", r"after 1 \(end_token\)"),
        (resumed(*(ReceivedOutput(n, ended=True) for n in range(3))), "received_outputs", "all 3 outputs have ended"),
    ],
)
def test_what_cannot_have_been_received_is_refused_by_name(request_: GenerationRequest, field: str, words: str) -> None:
    """Review C13."""
    with pytest.raises(InvalidRequest, match=words) as refusal:
        Admission(SERVED, default_max_new_tokens=40).admit(request_)
    assert refusal.value.field == field


@pytest.mark.review
def test_a_prompt_that_is_too_long_is_refused_before_its_tokens_are_looked_at() -> None:
    """review C5"""
    with pytest.raises(InvalidRequest, match="no room for output") as refusal:
        Admission(SERVED, default_max_new_tokens=40).admit(GenerationRequest(TokenIds((VOCABULARY_SIZE,) * 1000)))
    assert refusal.value.field == "prompt"


@pytest.mark.parametrize("cache_length", [None, 20])
@pytest.mark.parametrize("prompt", [TokenIds((5,) * 1000), Text("a" * 1_000_000)])
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_know(
    prompt: Prompt, cache_length: int | None
) -> None:
    """LiteLLM tells by words alone that another model might do, and knew none of them."""
    target = replace(SERVED.target, vocabulary_size=257)
    if cache_length:
        target = replace(target, cache=replace(target.cache, max_length=cache_length))
    served = Served(target, TextCodec(TokenizerFiles(byte_tokenizer().to_str())))
    with pytest.raises(PromptTooLong, match="^prompt is too long: "):
        admission(served).admit(GenerationRequest(prompt))
    limited = Admission(served, default_max_new_tokens=4, limits=RequestLimits(max_prompt_tokens=3))
    with pytest.raises(PromptTooLong, match="^prompt is too long: "):
        limited.admit(GenerationRequest(prompt))


def test_an_output_that_is_too_long_is_told_in_the_words_that_clients_know() -> None:
    with pytest.raises(PromptTooLong, match="this model's maximum context length is 1000"):
        admission().admit(GenerationRequest(TokenIds((5,)), max_new_tokens=1000))


@pytest.mark.review
def test_the_outputs_of_a_request_share_its_prompt_and_grow_each_alone() -> None:
    """review C5: each had a copy."""
    request = GenerationRequest(TokenIds((5, 6, 7)), completion_count=64)
    first, *others = Admission(SERVED, default_max_new_tokens=40).admit(request).generations
    assert isinstance(first.token_ids, CommittedTokens)
    assert {id(one.token_ids.prompt) for one in others if isinstance(one.token_ids, CommittedTokens)} == {
        id(first.token_ids.prompt)
    }
    first.commit([8], accepted_count=0, drafted_count=0, source=None)
    assert (first.token_ids[:], others[0].token_ids[:]) == ([5, 6, 7, 8], [5, 6, 7])


def test_what_is_resumed_on_another_day_has_the_prompt_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"
    codec = TextCodec(TokenizerFiles(byte_tokenizer().to_str(), template))
    served = Served(replace(SERVED.target, vocabulary_size=257), codec)
    asked = GenerationRequest(UserMessage("hi"), 10, seed=1)
    monkeypatch.setattr("coordinator.door.admission.now_s", lambda: 86_400)
    begun = admission(served).admit(asked)
    monkeypatch.setattr("coordinator.door.admission.now_s", lambda: 1_000_000_000)
    resumed = replace(asked, received_outputs=(ReceivedOutput(0, (7,)),), prompt_time_s=begun.prompt_time_s)
    (before,), (after,) = begun.generations, admission(served).admit(resumed).generations
    assert codec.tokenizer.decode(before.token_ids[:]).startswith(("1970-01-0", "1969-12-31"))
    assert after.token_ids[:] == [*before.token_ids[:], 7]
    assert admission(served).admit(asked).generations[0].token_ids[:] != before.token_ids[:]


@pytest.mark.parametrize("is_continued", [False, True])
def test_an_answer_that_is_continued_goes_on_with_the_space_of_its_next_word(is_continued: bool) -> None:
    """Decoders of Llama 2's kind leave a text's first space out: a continued message is no new text."""
    words = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁b": 2}, []))
    words.normalizer = normalizers.Replace(" ", "▁")
    words.decoder = llama_decoder(decoders.Strip(" ", 1, 0))
    words.add_special_tokens(["<s>"])
    served = Served(SERVED.target, TextCodec(TokenizerFiles(words.to_str(), "{{ messages[0].content }}<s>")))
    arguments = f'{{"continue_final_message": {str(is_continued).lower()}}}'
    asked = GenerationRequest(Chat((ChatMessage("assistant", "a"),), template_arguments=arguments))
    (generation,) = admission(served).admit(asked).generations
    text = "".join(one.text for one in generation.output.extend([2, 1], 0))
    assert text.rstrip() == (" ba" if is_continued else "ba")


class UntouchedCodec(TextCodec):
    def encode(self, prompt: Prompt, time_s: float | None = None) -> list[int]:
        raise AssertionError("it was tokenized")


@pytest.mark.review
@pytest.mark.parametrize(("limits", "most"), [(RequestLimits(), 1000), (RequestLimits(max_prompt_tokens=10), 10)])
@pytest.mark.parametrize("kind", [Text, UserMessage])
def test_a_text_that_no_tokens_could_be_long_enough_for_is_refused_before_it_is_tokenized(
    limits: RequestLimits, most: int, kind: type[Text | UserMessage]
) -> None:
    """review C10"""
    files = TokenizerFiles(byte_tokenizer().to_str())
    longest = len("<end>")

    def admit(codec: TextCodec, count: int) -> None:
        Admission(Served(SERVED.target, codec), default_max_new_tokens=40, limits=limits).admit(
            GenerationRequest(kind("a" * count))
        )

    with pytest.raises(InvalidRequest, match=f"has {4 * longest * most + 1} characters; give {4 * longest * most}"):
        admit(UntouchedCodec(files), 4 * longest * most + 1)
    with pytest.raises(AssertionError, match="it was tokenized"):
        admit(UntouchedCodec(files), 4 * longest * most)


def test_sources_that_this_version_does_not_know_may_be_named_and_forbidden() -> None:
    unknown = DraftingOptions((DraftSource.UNSPECIFIED,), True, (DraftSource.UNSPECIFIED,), "any model")
    request = Admission(SERVED, default_max_new_tokens=40).admit(GenerationRequest(TokenIds((5,)), drafting=unknown))
    assert [one.drafting for one in request.generations] == [unknown]


def admission(served: Served = SERVED) -> Admission:
    return Admission(served, default_max_new_tokens=40, guessers=Guessers(built_suffixes()))


def predicted_of(generation: Generation) -> tuple[int, ...]:
    """Return what is left of the output that the client expects."""
    guess = generation.guessers[DraftSource.PREDICTION].guess(generation.token_ids, 100)
    return guess.token_ids if guess else ()


@pytest.mark.parametrize("received", [(), (ReceivedOutput(0, (8, 9)),)])
def test_all_outputs_of_a_request_share_its_prediction_from_the_beginning_and_cut_to_what_can_be_used(
    received: tuple[ReceivedOutput, ...],
) -> None:
    request = GenerationRequest(
        TokenIds((5, 6)),
        4,
        seed=1,
        completion_count=2,
        received_outputs=received,
        predicted_output=TokenIds((8, 9, 10, 11, 12)),
    )
    first, second = admission().admit(request).generations
    assert predicted_of(first) == (8, 9, 10, 11)[first.output.count :]
    assert predicted_of(second) == (8, 9, 10, 11)


def test_what_was_received_is_read_without_a_look_at_what_outputs_share() -> None:
    """Admission's threads looked into texts that rounds dropped meanwhile."""
    library = built_suffixes()

    class OfRoundsAlone(SharedSuffixes):
        def guess(self, context: TokenList, most: int) -> NoReturn:
            raise AssertionError("another thread may change them now")

    guessers = Guessers(library, OfRoundsAlone(library, 80))
    taken = Admission(SERVED, default_max_new_tokens=40, guessers=guessers).admit(resumed(ReceivedOutput(0, (7, 8))))
    assert [one.output.count for one in taken.generations] == [2, 0, 0]


@pytest.mark.parametrize(
    ("request_", "sources"),
    [
        (GenerationRequest(TokenIds((5,))), [DraftSource.SUFFIX]),
        (
            GenerationRequest(TokenIds((5,)), predicted_output=TokenIds((6,))),
            [DraftSource.PREDICTION, DraftSource.SUFFIX],
        ),
        (GenerationRequest(TokenIds((5,)), predicted_output=TokenIds((6,)), max_draft_count=0), []),
        (
            GenerationRequest(
                TokenIds((5,)),
                predicted_output=TokenIds((6,)),
                drafting=DraftingOptions(forbidden_sources=(DraftSource.SUFFIX,)),
            ),
            [DraftSource.PREDICTION],
        ),
        (GenerationRequest(TokenIds((5,)), drafting=DraftingOptions((DraftSource.DRAFT,))), []),
    ],
)
def test_a_generation_has_the_sources_that_its_request_allows(
    request_: GenerationRequest, sources: list[DraftSource]
) -> None:
    (one,) = admission().admit(request_).generations
    assert list(one.guessers) == sources


class CountingCodec(TextCodec):
    """A codec that notes how long the texts are that it tokenizes."""

    def __init__(self, files: TokenizerFiles) -> None:
        super().__init__(files)
        self.lengths: list[int] = []

    def encode_continuation(self, text: str, prompt: Sequence[int]) -> list[int]:
        self.lengths.append(len(text))
        return super().encode_continuation(text, prompt)


def test_of_a_predicted_text_only_what_can_be_used_is_tokenized_and_what_no_output_could_hold_is_refused() -> None:
    codec = CountingCodec(TokenizerFiles(byte_tokenizer().to_str()))
    served = Served(replace(SERVED.target, vocabulary_size=257), codec)

    def predicted(count: int) -> int:
        request = GenerationRequest(Text("prompt"), 10, predicted_output=Text("a" * count))
        (generation,) = admission(served).admit(request).generations
        return len(predicted_of(generation))

    longest = len("<end>")
    most = 4 * longest * SERVED.target.longest_sequence
    assert (predicted(7), predicted(most)) == (7, 10)
    assert codec.lengths == [7, 4 * longest * 10]
    with pytest.raises(InvalidRequest, match=f"predicted_output has {most + 1} characters; give {most} at most"):
        predicted(most + 1)
