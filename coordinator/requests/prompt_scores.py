"""A prompt as its client sees it: tokens, their text, and their log-probabilities as the target computes them.

The target scores a prompt part by part, and from an earlier place again when it lost its cache. This knows nothing of
rounds.
"""

from collections.abc import Sequence

from paceline.detokenizer import TokenDecoder
from paceline.types import OutputToken, TokenLogprobs


def prompt_texts(token_ids: Sequence[int], decoder: TokenDecoder | None) -> list[str]:
    """Return the text that each token of a prompt completes; empty texts without a decoder."""
    if decoder is None:
        return [""] * len(token_ids)
    detokenizer = decoder.detokenizer()
    texts = [detokenizer.push(token_id) for token_id in token_ids]
    texts[-1] += detokenizer.flush()
    return texts


class PromptScores:
    def __init__(self, token_ids: Sequence[int], texts: Sequence[str]) -> None:
        self._token_ids = token_ids
        self._texts = texts
        self._logprobs: list[TokenLogprobs] = []
        """Of the tokens from the second on: nothing comes before the first."""

    @property
    def is_whole(self) -> bool:
        return len(self._logprobs) == len(self._token_ids) - 1

    def take(self, base_length: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take log-probabilities of the tokens from `base_length` + 1 on; they replace earlier ones from there on.

        Those beyond the prompt are left out.
        """
        assert base_length <= len(self._logprobs)
        self._logprobs[base_length:] = logprobs
        del self._logprobs[len(self._token_ids) - 1 :]

    def tokens(self) -> tuple[OutputToken, ...]:
        """Return the tokens of the prompt; those without log-probabilities yet have none."""
        scores = [None, *self._logprobs, *[None] * (len(self._token_ids) - 1 - len(self._logprobs))]
        parts = zip(self._token_ids, self._texts, scores, strict=True)
        return tuple(OutputToken(token_id, text, False, score) for token_id, text, score in parts)
