"""Turn a request into a sequence, or say what is wrong with it."""

import uuid
from itertools import count

from coordinator.output import Output, StopRules
from coordinator.sequence import Sequence
from coordinator.startup import Pair
from paceline.checks import check_token_ids
from paceline.errors import InvalidRequest
from paceline.types import GenerationRequest, TokenIds, Usage

MAX_STOP_STRINGS = 16


class Admission:
    def __init__(self, pair: Pair, *, default_max_new_tokens: int, draft_count: int) -> None:
        self._pair = pair
        self._default_max_new_tokens = default_max_new_tokens
        self._draft_count = draft_count
        # Several coordinators may share a model service, so ids must differ between them.
        self._instance = uuid.uuid4().hex[:12]
        self._numbers = count(1)

    def admit(self, request: GenerationRequest) -> Sequence:
        """Tokenize and check; InvalidRequest names the field that is wrong."""
        token_ids = self._encode(request)
        rules = StopRules(
            max_new_tokens=self._max_new_tokens(request, len(token_ids)),
            end_token_ids=frozenset() if request.ignore_end_tokens else frozenset(self._pair.target.end_token_ids),
            stop_token_ids=frozenset(request.stop_token_ids),
            stop_strings=self._stop_strings(request),
        )
        check_token_ids(request.stop_token_ids, self._pair.target.vocabulary_size, "stop_token_ids")
        return Sequence(
            sequence_id=f"{self._instance}-{next(self._numbers)}",
            token_ids=token_ids,
            output=Output(rules, self._pair.text.tokenizer if self._pair.text else None),
            max_draft_count=self._max_draft_count(request),
            usage=Usage(prompt_count=len(token_ids)),
        )

    def _encode(self, request: GenerationRequest) -> list[int]:
        if self._pair.text:
            token_ids = self._pair.text.encode(request.prompt)
        elif isinstance(request.prompt, TokenIds):
            token_ids = list(request.prompt.values)
        else:
            raise InvalidRequest("the models have no tokenizer; send the prompt as token_ids", field="prompt")
        if not token_ids:
            raise InvalidRequest("prompt is empty; give it at least one token", field="prompt")
        check_token_ids(token_ids, self._pair.target.vocabulary_size, "prompt.token_ids")
        return token_ids

    def _max_new_tokens(self, request: GenerationRequest, prompt_count: int) -> int:
        target = self._pair.target
        most = min(target.max_length, target.cache.max_length)
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
            return self._draft_count
        if request.max_draft_count < 0:
            raise InvalidRequest(
                f"max_draft_count is {request.max_draft_count}; 0 turns speculation off, more caps it",
                field="max_draft_count",
            )
        return request.max_draft_count

    def _stop_strings(self, request: GenerationRequest) -> tuple[str, ...]:
        stops = request.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop_strings has {len(stops)} entries; give {MAX_STOP_STRINGS} at most", field="stop_strings"
            )
        if "" in stops:
            raise InvalidRequest(
                "stop_strings holds an empty string, which would match anywhere; drop it", field="stop_strings"
            )
        if stops and not self._pair.text:
            raise InvalidRequest(
                "stop_strings need a tokenizer, which the models lack; use stop_token_ids", field="stop_strings"
            )
        return stops
