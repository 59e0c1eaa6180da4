"""Turn a request into a sequence, or say what is wrong with it."""

import hashlib
import secrets

from coordinator.limits import NO_LIMITS, RequestLimits
from coordinator.output import Output, StopRules
from coordinator.sequence import Sequence
from coordinator.startup import Served
from coordinator.stream import Stream
from paceline.checks import MAX_DRAFT_COUNT, check_token_ids
from paceline.detokenizer import TokenDecoder
from paceline.errors import InvalidRequest
from paceline.sampling_checks import check_min_new_tokens, check_sampling, check_top_logprob_count
from paceline.types import (
    GREEDY,
    ChoiceRule,
    GenerationRequest,
    ReceivedOutput,
    SamplingParameters,
    TokenIds,
    Usage,
)

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
"""Of all stop strings of a request together: each is looked for in all its outputs."""
MAX_STOP_TOKEN_IDS = 1024
"""They go with every row of every round."""


class Admission:
    def __init__(self, served: Served, *, default_max_new_tokens: int, limits: RequestLimits = NO_LIMITS) -> None:
        self._served = served
        self._decoder = TokenDecoder(served.text.tokenizer) if served.text else None
        self._default_max_new_tokens = limits.default_output_tokens(default_max_new_tokens)
        self._limits = limits

    def admit(self, request: GenerationRequest) -> list[Sequence]:
        """Tokenize and check; return a sequence for each output that has not ended.

        InvalidRequest names the field that is wrong.
        """
        token_ids = self._encode(request)
        self._limits.check(request, len(token_ids))
        self._check_stop_token_ids(request.stop_token_ids)
        check_top_logprob_count(request.top_logprob_count)
        received = self._received(request)
        rules = StopRules(
            max_new_tokens=self._max_new_tokens(request, len(token_ids)),
            end_token_ids=frozenset() if request.ignore_end_tokens else frozenset(self._served.target.end_token_ids),
            stop_token_ids=frozenset(request.stop_token_ids),
            stop_strings=self._stop_strings(request),
        )
        self._check_sampling(request.sampling, rules)
        left = [one for one in received if not one.ended]
        stream = Stream(len(left), secrets.randbits(64) if request.seed is None else request.seed)
        return [self._sequence(request, token_ids, rules, stream, one) for one in left]

    def _sequence(
        self,
        request: GenerationRequest,
        token_ids: list[int],
        rules: StopRules,
        stream: Stream,
        received: ReceivedOutput,
    ) -> Sequence:
        own_seed = completion_seed(stream.seed, received.completion_index)
        sequence = Sequence(
            # 128 random bits: ids of several coordinators differ, and knowing some tells nothing of others.
            sequence_id=secrets.token_hex(16),
            token_ids=list(token_ids),
            output=Output(rules, self._decoder),
            max_draft_count=self._max_draft_count(request),
            usage=Usage(prompt_count=len(token_ids)),
            stream=stream,
            completion_index=received.completion_index,
            rule=_choice_rule(request.sampling, own_seed, len(token_ids), rules),
            seed=own_seed,
            top_logprob_count=request.top_logprob_count,
        )
        if received.token_ids:
            _resume(sequence, received)
        return sequence

    def _received(self, request: GenerationRequest) -> list[ReceivedOutput]:
        """Return what the client has of each output, by completion index."""
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
            check_token_ids(one.token_ids, self._served.target.vocabulary_size, "received_outputs.token_ids")
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
        check_token_ids(token_ids, self._served.target.vocabulary_size, "stop_token_ids")

    def _check_sampling(self, sampling: SamplingParameters, rules: StopRules) -> None:
        vocabulary_size = self._served.target.vocabulary_size
        check_sampling(sampling, vocabulary_size)
        check_min_new_tokens(sampling, rules.end_token_ids | rules.stop_token_ids, vocabulary_size)
        if sampling.min_new_tokens > rules.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens is {sampling.min_new_tokens}, more than the {rules.max_new_tokens} of max_new_tokens",
                field="sampling.min_new_tokens",
            )

    def _encode(self, request: GenerationRequest) -> list[int]:
        if self._served.text:
            token_ids = self._served.text.encode(request.prompt)
        elif isinstance(request.prompt, TokenIds):
            token_ids = list(request.prompt.values)
        else:
            raise InvalidRequest("the models have no tokenizer; send the prompt as token_ids", field="prompt")
        if not token_ids:
            raise InvalidRequest("prompt is empty; give it at least one token", field="prompt")
        check_token_ids(token_ids, self._served.target.vocabulary_size, "prompt.token_ids")
        return token_ids

    def _max_new_tokens(self, request: GenerationRequest, prompt_count: int) -> int:
        target = self._served.target
        most = target.longest_sequence
        limited_by = "the model takes" if most == target.max_length else "the target's whole cache holds"
        room = most - prompt_count
        if room < 1:
            raise InvalidRequest(
                f"prompt has {prompt_count} tokens and leaves no room for output: {limited_by} {most} tokens, "
                "prompt and output together",
                field="prompt",
            )
        if request.max_new_tokens is None:
            return min(self._default_max_new_tokens, room)
        if not 1 <= request.max_new_tokens <= room:
            raise InvalidRequest(
                f"max_new_tokens is {request.max_new_tokens}; after a prompt of {prompt_count} tokens there is room "
                f"for 1 to {room}: {limited_by} {most}",
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
        if stops and not self._served.text:
            raise InvalidRequest(
                "stop_strings need a tokenizer, which the models lack; use stop_token_ids", field="stop_strings"
            )
        return stops


def _wrong_received(words: str) -> InvalidRequest:
    return InvalidRequest(f"received_outputs {words}", field="received_outputs")


def _resume(sequence: Sequence, received: ReceivedOutput) -> None:
    sequence.resume(received.token_ids)
    if sequence.output.finish_reason and sequence.output.count < len(received.token_ids):
        raise _wrong_received(
            f"has {len(received.token_ids)} tokens of output {received.completion_index}, which ends after "
            f"{sequence.output.count} ({sequence.output.finish_reason.value}); give the request they came from"
        )


def completion_seed(seed: int, index: int) -> int:
    """Seed of one of a request's outputs: the request's own for output 0, a hash of it and the index for others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _choice_rule(sampling: SamplingParameters, seed: int, prompt_count: int, rules: StopRules) -> ChoiceRule:
    if sampling == GREEDY.sampling:
        return GREEDY
    return ChoiceRule(sampling, seed, prompt_count, tuple(sorted(rules.end_token_ids | rules.stop_token_ids)))
