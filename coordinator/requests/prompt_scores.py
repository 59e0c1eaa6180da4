"""A prompt as its client sees it: tokens, their text, and their log-probabilities as the target computes them.

The target scores a prompt part by part, and from an earlier place again when it lost its cache. This knows nothing of
rounds.
"""

from collections.abc import Sequence
from dataclasses import replace

from coordinator.requests.output import with_bytes
from paceline.detokenizer import TokenDecoder
from paceline.types import OutputToken, TokenLogprobs


def prompt_texts(token_ids: Sequence[int], decoder: TokenDecoder | None) -> list[str]:
    """Return the text that each token of a prompt completes; empty texts without a decoder."""
    if decoder is None:
        return [""] * len(token_ids)
    detokenizer = decoder.detokenizer()
    texts = detokenizer.push_all(token_ids)
    texts[-1] += detokenizer.flush()
    return texts


class PromptScores:
    def __init__(self, token_ids: Sequence[int], decoder: TokenDecoder | None, *, are_wanted: bool) -> None:
        """`are_wanted` says whether log-probabilities are to come, and with them the bytes of tokens."""
        texts = prompt_texts(token_ids, decoder)
        self._tokens = [OutputToken(token_id, text, False) for token_id, text in zip(token_ids, texts, strict=True)]
        self._decoder = decoder
        # Nothing comes before the first token, so it has no log-probability.
        self._scored_count = 1 if are_wanted else len(self._tokens)
        if are_wanted:
            self._tokens[0] = self._complete(self._tokens[0])

    @property
    def is_whole(self) -> bool:
        return self._scored_count == len(self._tokens)

    def take(self, base_length: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take log-probabilities of the tokens from `base_length` + 1 on; they replace earlier ones from there on.

        Those beyond the prompt are left out.
        """
        first, stop = base_length + 1, min(base_length + 1 + len(logprobs), len(self._tokens))
        assert first <= self._scored_count
        for place, own in zip(range(first, stop), logprobs, strict=False):
            self._tokens[place] = self._complete(replace(self._tokens[place], logprobs=own))
        self._scored_count = stop

    def _complete(self, token: OutputToken) -> OutputToken:
        return with_bytes(token, self._decoder) if self._decoder else token

    def tokens(self) -> tuple[OutputToken, ...]:
        """Return the tokens of the prompt; those without log-probabilities yet have none."""
        return tuple(self._tokens)
