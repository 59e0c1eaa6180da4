"""The choices of an answer: what becomes of the tokens of one output, whether they come at once or in parts."""

import sys
from collections.abc import Sequence
from typing import Protocol

from paceline.gateway.bodies import ChatBody, CompletionBody, Json
from paceline.gateway.logprobs import chat_logprobs, completion_logprobs
from paceline.gateway.tool_calls import Found, FoundCall, ToolFormat, call_finder
from paceline.types import FinishReason, GenerationFinish, OutputToken


class Choice(Protocol):
    """One output, of which any number of parts is written."""

    def write(
        self, tokens: Sequence[OutputToken], finish: GenerationFinish | None, prompt: Sequence[OutputToken] = ()
    ) -> Json | None:
        """Return the choice of a chunk with these tokens; None when there is nothing to show yet."""
        ...

    def whole(
        self, tokens: Sequence[OutputToken], finish: GenerationFinish, prompt: Sequence[OutputToken] = ()
    ) -> Json:
        """Return the choice of an answer with all tokens."""
        ...


def finish_reason(finish: GenerationFinish | None) -> str | None:
    if finish is None:
        return None
    return "length" if finish.reason is FinishReason.LENGTH else "stop"


class ChatChoice:
    def __init__(self, index: int, body: ChatBody, tool_format: ToolFormat) -> None:
        self._index = index
        self._has_logprobs = bool(body.logprobs)
        self._has_ids = bool(body.return_token_ids)
        self._finder = call_finder(tool_format, body.tool_names) if body.calls_tools else None
        self._most_calls = 1 if body.parallel_tool_calls is False else sys.maxsize
        """Calls that the client takes. Those behind them are left out."""
        self._is_first = True
        self._call_count = 0

    def write(
        self, tokens: Sequence[OutputToken], finish: GenerationFinish | None, prompt: Sequence[OutputToken] = ()
    ) -> Json | None:
        found = self._found("".join([one.text for one in tokens]), is_end=finish is not None)
        delta: Json = {}
        if self._is_first:
            delta = {"role": "assistant", "content": found.text}
        elif found.text:
            delta = {"content": found.text}
        if found.calls:
            delta["tool_calls"] = [
                {"index": self._call_count + place, **_call(one)} for place, one in enumerate(found.calls)
            ]
            self._call_count += len(found.calls)
        shows_tokens = tokens and (self._has_logprobs or self._has_ids)
        if not (delta or finish or shows_tokens):
            return None
        self._is_first = False
        return self._choice("delta", delta, tokens, finish)

    def whole(
        self, tokens: Sequence[OutputToken], finish: GenerationFinish, prompt: Sequence[OutputToken] = ()
    ) -> Json:
        found = self._found("".join([one.text for one in tokens]), is_end=True)
        self._call_count = len(found.calls)
        message: Json = {"role": "assistant", "content": found.text, "refusal": None}
        if found.calls:
            message |= {"content": found.text or None, "tool_calls": [_call(one) for one in found.calls]}
        return self._choice("message", message, tokens, finish)

    def _choice(self, key: str, value: Json, tokens: Sequence[OutputToken], finish: GenerationFinish | None) -> Json:
        reason = finish_reason(finish)
        choice: Json = {
            "index": self._index,
            key: value,
            "logprobs": chat_logprobs(tokens) if self._has_logprobs else None,
            "finish_reason": "tool_calls" if reason == "stop" and self._call_count else reason,
        }
        if self._has_ids:
            choice["token_ids"] = [one.token_id for one in tokens]
        return choice

    def _found(self, text: str, *, is_end: bool) -> Found:
        if self._finder is None:
            return Found(text)
        found = self._finder.feed(text)
        if is_end:
            rest = self._finder.finish()
            found = Found(found.text + rest.text, found.calls + rest.calls)
        return Found(found.text, found.calls[: self._most_calls - self._call_count])


def _call(call: FoundCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionChoice:
    def __init__(self, index: int, body: CompletionBody) -> None:
        self._index = index
        self._has_logprobs = body.logprobs is not None
        self._has_ids = bool(body.return_token_ids)
        self._offset = 0
        """Characters written so far."""

    def write(
        self, tokens: Sequence[OutputToken], finish: GenerationFinish | None, prompt: Sequence[OutputToken] = ()
    ) -> Json | None:
        shown = [*prompt, *tokens]
        text = "".join([one.text for one in shown])
        if not (text or finish or (shown and (self._has_logprobs or self._has_ids))):
            return None
        choice: Json = {
            "index": self._index,
            "text": text,
            "logprobs": completion_logprobs(shown, self._offset) if self._has_logprobs else None,
            "finish_reason": finish_reason(finish),
        }
        if self._has_ids:
            choice["token_ids"] = [one.token_id for one in shown]
        self._offset += len(text)
        return choice

    def whole(
        self, tokens: Sequence[OutputToken], finish: GenerationFinish, prompt: Sequence[OutputToken] = ()
    ) -> Json:
        choice = self.write(tokens, finish, prompt)
        assert choice is not None
        return choice
