"""The answer to a request, from the pieces of its outputs: events of a stream, or one object."""

import json
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

from paceline.gateway.account import Account, told_of_piece
from paceline.gateway.apis import Api, BodyT
from paceline.gateway.bodies import Json
from paceline.gateway.sse import DONE, event
from paceline.gateway.tool_calls import ToolFormat
from paceline.types import FinishReason, GenerationFinish, OutputPiece, OutputToken

# Made once: `json.dumps` would make an encoder for every chunk.
_encode = json.JSONEncoder(separators=(",", ":")).encode
LONG_TOKENS = 1024
"""Tokens in an answer from which on a thread writes it: with log-probabilities each takes 15 to 90 us."""

PART_TOKENS = 32
"""Most tokens in an event. With 20 log-probabilities of 18 characters each takes 2.8 KB, and aiohttp reads no line of
more than 128 KiB.
"""


class Answer(Generic[BodyT]):
    """What all answers have: names, choices and counts."""

    def __init__(
        self, api: Api[BodyT], body: BodyT, prompt_count: int, model: str, tool_format: ToolFormat, trace_id: str | None
    ) -> None:
        """`model` is the model's name; empty: the one that the coordinator tells."""
        self._body = body
        self._api = api
        self._output_count = body.output_count
        self._trace_id = trace_id
        self._model = model
        self._id = f"{api.id_prefix}{secrets.token_hex(12)}"
        self._created_s = int(time.time())
        self._choices = [api.choice(index, body, tool_format) for index in range(prompt_count * self._output_count)]
        self.account = Account(len(self._choices))

    def _head(self, kind: str) -> Json:
        model = self._model or self.account.model_id
        return {"id": self._id, "object": kind, "created": self._created_s, "model": model}

    def _own(self, piece: OutputPiece) -> OutputPiece:
        """Return what the client gets: a coordinator makes a token for those too who want the prompt alone."""
        if not self._body.is_prompt_alone:
            return piece
        return replace(piece, tokens=(), finish=piece.finish and replace(piece.finish, reason=FinishReason.LENGTH))

    def is_long(self, prompt_tokens: int, output_tokens: int = 0) -> bool:
        """Whether others should not wait until so many tokens are written, those of prompts once for each output."""
        return self._output_count * prompt_tokens + output_tokens > LONG_TOKENS

    def _index(self, prompt_index: int, completion_index: int) -> int:
        return prompt_index * self._output_count + completion_index


class StreamedAnswer(Answer[BodyT]):
    """An answer that is written as its pieces come."""

    _start: str | None = None
    """JSON of what every chunk begins with; None before the first chunk."""

    def write(self, prompt_index: int, piece: OutputPiece) -> Iterator[bytes]:
        """Yield the events for a piece: those of a prompt for each of its outputs, then those for the rest."""
        if self._start is None:
            self._start = _encode(self._head(self._api.chunk_object))[:-1]
        piece = self._own(piece)
        self.account.add(prompt_index, piece)
        for prompt in self._prompt_choices(prompt_index, piece):
            yield self._event([prompt], {})
        output = self._choices[self._index(prompt_index, piece.completion_index)]
        *parts, last = _parts(piece.tokens)
        for part in parts:
            if choice := output.write(part, None):
                yield self._event([choice], {})
        choice = output.write(last, piece.finish)
        choices = [choice] if choice else []
        ends, usage_last = self.account.is_whole, self._body.includes_usage
        told = told_of_piece(piece) if self._body.tells and piece.tokens else {}
        if ends and not usage_last:
            told |= self.account.told(self._trace_id)
        events = self._event(choices, told) if choices or told else b""
        if ends and usage_last:
            events += self._event([], self.account.told(self._trace_id), is_last=True)
        if events or ends:
            yield events + DONE if ends else events

    def _prompt_choices(self, prompt_index: int, piece: OutputPiece) -> Iterator[Json]:
        """Yield choices with the prompt, which comes once, for each of its outputs: a part of it in each."""
        if not piece.prompt_tokens:
            return
        first = self._index(prompt_index, 0)
        for one in self._choices[first : first + self._output_count]:
            for part in _parts(piece.prompt_tokens):
                if written := one.write((), None, part):
                    yield written

    def _event(self, choices: list[Json], told: Json, *, is_last: bool = False) -> bytes:
        rest: Json = {"choices": choices}
        if self._body.includes_usage:
            rest["usage"] = self.account.usage() if is_last or self._body.includes_usage_always else None
        if told:
            rest["paceline"] = told
        return event(f"{self._start},{_encode(rest)[1:]}")


def _parts(tokens: Sequence[OutputToken]) -> list[Sequence[OutputToken]]:
    """Return the tokens, or none, by the events that have them."""
    if len(tokens) <= PART_TOKENS:
        return [tokens]
    tokens = list(tokens)  # slices of a run would make all of its tokens again
    return [tokens[begin : begin + PART_TOKENS] for begin in range(0, len(tokens), PART_TOKENS)]


@dataclass
class _Output:
    tokens: list[OutputToken] = field(default_factory=list)
    finish: GenerationFinish | None = None


class WholeAnswer(Answer[BodyT]):
    """An answer that is written when all of it is there."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._outputs: defaultdict[int, _Output] = defaultdict(_Output)
        self._prompts: dict[int, Sequence[OutputToken]] = {}

    def add(self, prompt_index: int, piece: OutputPiece) -> None:
        piece = self._own(piece)
        self.account.add(prompt_index, piece)
        if piece.prompt_tokens:
            self._prompts[prompt_index] = piece.prompt_tokens
        output = self._outputs[self._index(prompt_index, piece.completion_index)]
        output.tokens += piece.tokens
        output.finish = output.finish or piece.finish

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts that are sent back."""
        return sum(map(len, self._prompts.values()))

    def body(self) -> bytes:
        """Return the JSON, of which each choice is made by itself: a thread makes way for others between two."""
        choices = b",".join(_encode(self._whole_choice(index)).encode() for index in range(len(self._choices)))
        head = _encode(self._head(self._api.whole_object))[:-1]
        rest = _encode({"usage": self.account.usage(), "paceline": self.account.told(self._trace_id)})[1:]
        return b"".join((f'{head},"choices":['.encode(), choices, f"],{rest}".encode()))

    def _whole_choice(self, index: int) -> Json:
        output = self._outputs[index]
        assert output.finish is not None, "the client raises for an output without a finish"
        prompt = self._prompts.get(index // self._output_count, ())
        return self._choices[index].whole(output.tokens, output.finish, prompt)
