"""Admission: a request is checked, tokenized and turned into generations, or refused with the reason."""

import hashlib
import secrets
import sys
import time
from array import array
from collections.abc import Callable, Sequence

from coordinator.door.drafting_options import check_drafting, predicted_token_ids, useful_options
from coordinator.door.limits import NO_LIMITS, RequestLimits
from coordinator.door.response_formats import check_response_format
from coordinator.door.served import Served, named
from coordinator.drafting.guessers import Guessers, GuessersOf
from coordinator.replicas.stickiness import beginnings_of
from coordinator.requests.committed_tokens import CommittedTokens, packed
from coordinator.requests.generation import Generation, Request
from coordinator.requests.output import Output, StopRules
from coordinator.requests.prompt_scores import PromptScores
from coordinator.requests.stream import Stream
from paceline.chat_template import LATEST_TIME_S, character_count, is_continued
from paceline.checks import (
    MAX_DRAFT_COUNT,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    check_min_new_tokens,
    check_sampling,
    check_token_ids,
    check_top_logprob_count,
)
from paceline.detokenizer import TokenDecoder
from paceline.errors import InvalidRequest, ModelChanged, PromptTooLong
from paceline.text import TextCodec
from paceline.types import (
    GREEDY,
    Chat,
    ChoiceRule,
    DraftingOptions,
    GenerationRequest,
    Prompt,
    ReceivedOutput,
    SamplingParameters,
    Text,
    TokenIds,
    Usage,
)

TAIL_TOKENS = 64
"""Tokens of a prompt of which one has whole characters, if any has; the others are special, or bytes of characters."""
MAX_ECHOED_TOKENS = 16_384
"""Most tokens of a prompt that is sent back: with 20 likeliest tokens at each place that takes 40 MiB here, and 6.5
MiB of the one message, with the tokens' bytes."""


class Admission:
    def __init__(
        self,
        served: Served,
        *,
        default_max_new_tokens: int,
        limits: RequestLimits = NO_LIMITS,
        guessers: Guessers | None = None,
    ) -> None:
        """`guessers` makes what sources without a model know of a request; None: there are no such sources."""
        self.served = served
        self._guessers = guessers
        self._decoder = TokenDecoder(served.text.tokenizer) if served.text else None
        self._default_max_new_tokens = limits.default_output_tokens(default_max_new_tokens)
        self._limits = limits

    def admit(self, request: GenerationRequest) -> Request:
        """Check and tokenize a request; return it with a generation for each output that has not ended.

        Raise InvalidRequest, naming the wrong field, or ModelChanged when another model is served than asked for.
        """
        self._check_model(request.model_digest)
        self._limits.check(request)
        self._check_stop_token_ids(request.stop_token_ids)
        check_top_logprob_count(request.top_logprob_count)
        check_drafting(request.drafting)
        received = self._received(request)
        stop_strings = self._stop_strings(request)
        prompt_time_s = _prompt_time_s(request)
        prompt = self._encode(request.prompt, prompt_time_s)
        rules = StopRules(
            max_new_tokens=self._max_new_tokens(request, len(prompt)),
            end_token_ids=frozenset() if request.ignore_end_tokens else frozenset(self.served.target.end_token_ids),
            stop_token_ids=frozenset(request.stop_token_ids),
            stop_strings=stop_strings,
        )
        self._check_sampling(request.sampling, rules)
        if request.echo_prompt:
            _check_echo(request, len(prompt))
        check_response_format(request, self.served, rules.all_end_token_ids, received)
        predicted = predicted_token_ids(request.predicted_output, self.served, prompt, rules.max_new_tokens)
        left = [one for one in received if not one.ended]
        admitted = _without_generations(request, prompt, len(left), prompt_time_s)
        guessers = self._guessers_of(request, prompt, predicted)
        before, drafting = _text_before(request, prompt), useful_options(request.drafting)
        admitted.generations = [
            self._generation(request, prompt, guessers(), drafting, rules, admitted, one, before) for one in left
        ]
        if request.echo_prompt:
            self._echo(prompt, admitted)
        return admitted

    def _echo(self, prompt: "array[int]", admitted: Request) -> None:
        """Send the prompt, or have the first output's rounds ask for what is to be sent with it."""
        first = admitted.generations[0]
        scores = PromptScores(prompt, self._decoder, are_wanted=first.top_logprob_count is not None)
        if scores.is_whole:
            admitted.stream.put_prompt(scores.tokens())
        else:
            first.prompt_scores = scores

    def _guessers_of(
        self, request: GenerationRequest, prompt: "array[int]", predicted: "array[int]"
    ) -> Callable[[], GuessersOf]:
        if self._guessers is None or request.max_draft_count == 0:
            return dict
        return self._guessers.of_request(prompt, request.drafting, predicted)

    def _generation(
        self,
        request: GenerationRequest,
        prompt: "array[int]",
        guessers: GuessersOf,
        drafting: DraftingOptions,
        rules: StopRules,
        admitted: Request,
        received: ReceivedOutput,
        before: Sequence[int],
    ) -> Generation:
        own_seed = completion_seed(admitted.seed, received.completion_index)
        generation = Generation(
            # 128 random bits: ids of several coordinators differ, and one id tells nothing about others.
            sequence_id=secrets.token_hex(16),
            token_ids=CommittedTokens(prompt),
            output=Output(rules, self._decoder, omits_text=request.omit_text, after=before),
            max_draft_count=self._max_draft_count(request),
            usage=Usage(prompt_count=len(prompt)),
            request=admitted,
            completion_index=received.completion_index,
            rule=_choice_rule(request, own_seed, len(prompt), rules),
            seed=own_seed,
            top_logprob_count=request.top_logprob_count,
            drafting=drafting,
            guessers=guessers,
        )
        if received.token_ids:
            _resume(generation, received)
            for guesser in guessers.values():
                guesser.read(generation.token_ids)  # here: no round is to wait for it
        return generation

    def _check_model(self, wanted: str) -> None:
        served = self.served.target
        # A target may tell no digest: there is nothing to compare then.
        if wanted and (own := served.identity.model_digest) and wanted != own:
            raise ModelChanged(
                f"model_digest is {wanted[:12]!r}, which what was received is of, and {named(served)} is served now; "
                "leave both out to begin anew, or ask where the other model is served"
            )

    def _received(self, request: GenerationRequest) -> list[ReceivedOutput]:
        """Return the part of each output that the client has already, by completion index."""
        if request.received_outputs and request.seed is None:
            raise InvalidRequest(
                "received_outputs are there and seed is not; give the seed that the first message of their stream told",
                field="seed",
            )
        received = {index: ReceivedOutput(index) for index in range(request.completion_count)}
        named: set[int] = set()
        for one in request.received_outputs:
            index = one.completion_index
            if index not in received:
                raise _wrong_received(f"names output {index}; give 0 to {request.completion_count - 1}")
            if index in named:
                raise _wrong_received(
                    f"names output {index} twice; give all of it once (received_token_ids is output 0)"
                )
            check_token_ids(one.token_ids, self.served.target.vocabulary_size, "received_outputs.token_ids")
            named.add(index)
            received[index] = one
        if all(one.ended for one in received.values()):
            raise _wrong_received(f"says that all {len(received)} outputs have ended; nothing is left to ask for")
        return list(received.values())

    def _check_stop_token_ids(self, token_ids: tuple[int, ...]) -> None:
        if len(token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids has {len(token_ids)} entries; give {MAX_STOP_TOKEN_IDS} at most",
                field="stop_token_ids",
            )
        check_token_ids(token_ids, self.served.target.vocabulary_size, "stop_token_ids")

    def _check_sampling(self, sampling: SamplingParameters, rules: StopRules) -> None:
        vocabulary_size = self.served.target.vocabulary_size
        check_sampling(sampling, vocabulary_size)
        check_min_new_tokens(sampling, rules.all_end_token_ids, vocabulary_size)
        if sampling.min_new_tokens > rules.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens is {sampling.min_new_tokens}, more than the {rules.max_new_tokens} of max_new_tokens",
                field="sampling.min_new_tokens",
            )

    def _encode(self, prompt: Prompt, time_s: int) -> "array[int]":
        """Return the prompt's token ids. Its length is checked before anything that takes time."""
        token_ids: Sequence[int]
        if isinstance(prompt, TokenIds):
            token_ids = prompt.values
        elif self.served.text:
            count = character_count(prompt) if isinstance(prompt, Chat) else len(prompt.value)
            self._check_text(count, self.served.text)
            token_ids = self.served.text.encode(prompt, time_s)
        else:
            raise InvalidRequest("the models have no tokenizer; send the prompt as token_ids", field="prompt")
        if not token_ids:
            raise InvalidRequest("prompt is empty; give it at least one token", field="prompt")
        self._limits.check_prompt(len(token_ids))
        self._check_room(len(token_ids))
        check_token_ids(token_ids, self.served.target.vocabulary_size, "prompt.token_ids")
        return packed(token_ids)

    def _check_text(self, count: int, codec: TextCodec) -> None:
        """Raise InvalidRequest for a text that would not fit even if all its tokens were the longest there are."""
        most = min(self.served.target.longest_sequence, self._limits.max_prompt_tokens or sys.maxsize)
        if count > codec.most_characters(most):
            raise PromptTooLong(
                f"prompt is too long: it has {count} characters; give {codec.most_characters(most)} at most: no more "
                f"can fit into the {most} tokens that are taken here",
                field="prompt",
            )

    def _check_room(self, prompt_count: int) -> None:
        most = self.served.target.longest_sequence
        if prompt_count >= most:
            raise PromptTooLong(
                f"prompt is too long: with {prompt_count} tokens it leaves no room for output; {self._limited_by} "
                f"{most} tokens, prompt and output together",
                field="prompt",
            )

    @property
    def _limited_by(self) -> str:
        target = self.served.target
        is_model = target.longest_sequence == target.max_length
        # Clients tell by these words, and by "prompt is too long", that another model might do.
        return "this model's maximum context length is" if is_model else "the target's whole cache holds"

    def _max_new_tokens(self, request: GenerationRequest, prompt_count: int) -> int:
        most = self.served.target.longest_sequence
        room = most - prompt_count
        if request.max_new_tokens is None:
            return min(self._default_max_new_tokens, room)
        if not 1 <= request.max_new_tokens <= room:
            kind = PromptTooLong if request.max_new_tokens > room else InvalidRequest
            raise kind(
                f"max_new_tokens is {request.max_new_tokens}; after a prompt of {prompt_count} tokens there is room "
                f"for 1 to {room}: {self._limited_by} {most}",
                field="max_new_tokens",
            )
        return request.max_new_tokens

    def _max_draft_count(self, request: GenerationRequest) -> int:
        if request.max_draft_count is None:
            return MAX_DRAFT_COUNT
        if request.max_draft_count < 0:
            raise InvalidRequest(
                f"max_draft_count is {request.max_draft_count}; 0 turns speculation off, more caps it",
                field="max_draft_count",
            )
        return min(request.max_draft_count, MAX_DRAFT_COUNT)

    def _stop_strings(self, request: GenerationRequest) -> tuple[str, ...]:
        stops = request.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop_strings has {len(stops)} entries; give {MAX_STOP_STRINGS} at most", field="stop_strings"
            )
        if (character_count := sum(map(len, stops))) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop_strings have {character_count} characters; give {MAX_STOP_CHARACTERS} at most, all together",
                field="stop_strings",
            )
        if "" in stops:
            raise InvalidRequest(
                "stop_strings holds an empty string, which would match anywhere; drop it", field="stop_strings"
            )
        if stops and not self.served.text:
            raise InvalidRequest(
                "stop_strings need a tokenizer, which the models lack; use stop_token_ids", field="stop_strings"
            )
        return stops


def _text_before(request: GenerationRequest, prompt: "array[int]") -> Sequence[int]:
    """Return the last tokens of a prompt that its output goes on with: the answer to a conversation is a new text.

    A conversation whose last message is to be continued ends with what it has of the answer.
    """
    is_begun = isinstance(request.prompt, Text | TokenIds) or is_continued(request.prompt)
    return prompt[-TAIL_TOKENS:] if is_begun else ()


def now_s() -> int:
    return int(time.time())


def _prompt_time_s(request: GenerationRequest) -> int:
    """Return the time for the chat template. Raise InvalidRequest for one that no calendar has."""
    if request.prompt_time_s is None:
        return now_s()
    if not 0 <= request.prompt_time_s <= LATEST_TIME_S:
        raise InvalidRequest(
            f"prompt_time_s is {request.prompt_time_s}; give 0 to {LATEST_TIME_S}, or leave it out for now",
            field="prompt_time_s",
        )
    return request.prompt_time_s


def _without_generations(
    request: GenerationRequest, prompt: "array[int]", output_count: int, prompt_time_s: int
) -> Request:
    """Return what is admitted, but for its outputs."""
    return Request(
        Stream(output_count, sends_prompt=request.echo_prompt),
        secrets.randbits(64) if request.seed is None else request.seed,
        tells_rounds=request.tell_rounds,
        beginnings=beginnings_of(prompt, len(prompt)),
        omits_text=request.omit_text,
        prompt_time_s=prompt_time_s,
    )


def _wrong_received(words: str) -> InvalidRequest:
    return InvalidRequest(f"received_outputs {words}", field="received_outputs")


def _check_echo(request: GenerationRequest, prompt_count: int) -> None:
    if request.received_outputs:
        raise InvalidRequest(
            "echo_prompt is set and received_outputs are there; the prompt came before them, so leave echo_prompt out",
            field="echo_prompt",
        )
    if prompt_count > MAX_ECHOED_TOKENS:
        raise InvalidRequest(
            f"echo_prompt is set for a prompt of {prompt_count} tokens; {MAX_ECHOED_TOKENS} at most are sent back, so "
            "leave it out or shorten the prompt",
            field="echo_prompt",
        )


def _resume(generation: Generation, received: ReceivedOutput) -> None:
    generation.resume(received.token_ids)
    if generation.output.finish_reason and generation.output.count < len(received.token_ids):
        raise _wrong_received(
            f"has {len(received.token_ids)} tokens of output {received.completion_index}, which ends after "
            f"{generation.output.count} ({generation.output.finish_reason.value}); give the request they came from"
        )


def completion_seed(seed: int, index: int) -> int:
    """Return the seed of one output: the request's own for output 0, for others a hash of that and the index."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _choice_rule(request: GenerationRequest, seed: int, prompt_count: int, rules: StopRules) -> ChoiceRule:
    if request.sampling == GREEDY.sampling and request.response_format is None:
        return GREEDY
    ends = tuple(sorted(rules.all_end_token_ids))
    return ChoiceRule(request.sampling, seed, prompt_count, ends, request.response_format)
