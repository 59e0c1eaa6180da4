"""The output of a generation as its client sees it: tokens, their text, and why it ended.

Owns stop conditions. Knows nothing of rounds or caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from coordinator.requests.stop_strings import StopStringMatcher, StopStrings
from paceline.detokenizer import TokenDecoder
from paceline.types import DraftSource, FinishReason, OutputToken, TokenLogprobs, TokenRun


@dataclass(frozen=True)
class StopRules:
    max_new_tokens: int
    end_token_ids: frozenset[int]
    """The model's own end tokens; empty when the request ignores them."""
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    @cached_property
    def all_end_token_ids(self) -> frozenset[int]:
        """Tokens after any of which the output ends."""
        return self.end_token_ids | self.stop_token_ids

    @cached_property
    def stops(self) -> StopStrings:
        """The automaton of the stop strings, made once for all outputs of a request."""
        return StopStrings(self.stop_strings)


class Output:
    """Grows token by token until a stop rule ends it."""

    def __init__(
        self, rules: StopRules, decoder: TokenDecoder | None, *, omits_text: bool = False, after: Sequence[int] = ()
    ) -> None:
        """With `omits_text`, and without a decoder, every token's text is empty.

        `after` are the tokens before it whose text it goes on with.
        """
        self._rules = rules
        self._decoder = decoder
        self._omits_text = omits_text
        # Stop strings are looked for in the text, whether it is sent or not.
        needs_text = bool(rules.stop_strings) or not omits_text
        self._detokenizer = decoder.detokenizer(after) if decoder and needs_text else None
        self._stops = StopStringMatcher(rules.stops)
        self.count = 0
        self.finish_reason: FinishReason | None = None

    @property
    def max_new_tokens(self) -> int:
        return self._rules.max_new_tokens

    @property
    def remaining_count(self) -> int:
        return self._rules.max_new_tokens - self.count

    def extend(
        self,
        token_ids: Sequence[int],
        accepted_count: int,
        logprobs: Sequence[TokenLogprobs] = (),
        source: DraftSource | None = None,
    ) -> Sequence[OutputToken]:
        """Add a round's tokens up to the one that ends the output; `source` drafted the first `accepted_count`."""
        if not (logprobs or self._rules.stop_strings or self._may_end(token_ids)):
            self.count += len(token_ids)
            texts = self._detokenizer.push_all(token_ids) if self._detokenizer else ()
            return TokenRun(token_ids, texts, accepted_count, source)
        tokens: list[OutputToken] = []
        for position, (token_id, own_logprobs) in enumerate(zip_longest(token_ids, logprobs)):
            accepted, text = position < accepted_count, self._push(token_id)
            token = OutputToken(token_id, text, accepted, own_logprobs, source if accepted else None)
            tokens.append(with_bytes(token, self._decoder) if own_logprobs and self._decoder else token)
            if self.finish_reason:
                break
        return tuple(tokens)

    def _may_end(self, token_ids: Sequence[int]) -> bool:
        """Return whether the output may end with one of these tokens."""
        rules = self._rules
        may_go_on = self.count + len(token_ids) < rules.max_new_tokens
        return not (may_go_on and rules.all_end_token_ids.isdisjoint(token_ids))

    def _push(self, token_id: int) -> str:
        self.count += 1
        text, stopped = self._stops.push(self._detokenizer.push(token_id) if self._detokenizer else "")
        if token_id in self._rules.end_token_ids:
            self.finish_reason = FinishReason.END_TOKEN
        elif token_id in self._rules.stop_token_ids:
            self.finish_reason = FinishReason.STOP_TOKEN
        elif stopped:
            self.finish_reason = FinishReason.STOP_STRING
        elif self.remaining_count == 0:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason and not stopped:
            text += self._flush()
        return "" if self._omits_text else text

    def _flush(self) -> str:
        text, stopped = self._stops.push(self._detokenizer.flush() if self._detokenizer else "")
        return text if stopped else text + self._stops.drain()


def with_bytes(token: OutputToken, decoder: TokenDecoder) -> OutputToken:
    """Add the bytes of the token and of the likeliest ones in its place."""
    top = token.logprobs.top if token.logprobs else ()
    return replace(
        token,
        token_bytes=decoder.bytes_of(token.token_id),
        top_token_bytes=tuple(decoder.bytes_of(token_id) for token_id, _ in top),
    )
