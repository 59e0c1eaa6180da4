"""What a client sees of a sequence: its tokens, their text, and why it ended.

Owns stop conditions and the holding back of text that may yet turn out to be part of a stop string. Knows nothing of
rounds or caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from paceline.detokenizer import TokenDecoder
from paceline.types import FinishReason, OutputToken, TokenLogprobs


@dataclass(frozen=True)
class StopRules:
    max_new_tokens: int
    end_token_ids: frozenset[int]
    """The model's own; empty when the request ignores them."""
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


class StopStringMatcher:
    """Passes text on up to the first stop string, holding back what may be the start of one."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return what is safe to show, and whether a stop string was reached."""
        self._held += text
        found = [start for stop in self._stop_strings if (start := self._held.find(stop)) >= 0]
        if found:
            return self._held[: min(found)], True
        held_count = max((_overlap(self._held, stop) for stop in self._stop_strings), default=0)
        shown = self._held[: len(self._held) - held_count]
        self._held = self._held[len(shown) :]
        return shown, False

    def drain(self) -> str:
        """Return what is held back: the output ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that begins `stop` without completing it."""
    return next((count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])), 0)


class Output:
    """Grows token by token until a stop rule ends it."""

    def __init__(self, rules: StopRules, decoder: TokenDecoder | None) -> None:
        """Without a decoder every token's text is empty."""
        self._rules = rules
        self._detokenizer = decoder.detokenizer() if decoder else None
        self._stops = StopStringMatcher(rules.stop_strings)
        self.count = 0
        self.finish_reason: FinishReason | None = None

    @property
    def remaining_count(self) -> int:
        return self._rules.max_new_tokens - self.count

    def extend(
        self, token_ids: Sequence[int], accepted_count: int, logprobs: Sequence[TokenLogprobs] = ()
    ) -> list[OutputToken]:
        """Add a round's tokens up to the one that ends the output; the first `accepted_count` are the draft's."""
        tokens: list[OutputToken] = []
        for position, (token_id, own_logprobs) in enumerate(zip_longest(token_ids, logprobs)):
            tokens.append(OutputToken(token_id, self._push(token_id), position < accepted_count, own_logprobs))
            if self.finish_reason:
                break
        return tokens

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
            return text + self._flush()
        return text

    def _flush(self) -> str:
        text, stopped = self._stops.push(self._detokenizer.flush() if self._detokenizer else "")
        return text if stopped else text + self._stops.drain()
