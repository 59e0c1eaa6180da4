"""Masks of response formats: which tokens a rule's format allows at each place of a sequence, as tensors.

A mask depends on the output before its place and on the rule alone, so draft and target have the same one. Owns what is
kept of each sequence; `paceline.grammars` says what a format allows.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from paceline.errors import InvalidRequest
from paceline.grammars import Grammars, Progress
from paceline.types import ChoiceRule, ResponseFormat, TokenizerFiles

KEPT_COUNT = 512
"""Sequences whose progress is kept; others read their output again, with the same result."""

_EIGHT_BITS = (torch.arange(256)[:, None] >> torch.arange(8) & 1).bool().view(torch.int64)[:, 0]
"""The bits of each byte as eight bytes, read as one number: so they are looked up much faster than shifted out."""


class Masks:
    def __init__(self, tokenizer: TokenizerFiles | None) -> None:
        # Made when the model is loaded, so that no call waits for the vocabulary.
        self._grammars = Grammars(Tokenizer.from_str(tokenizer.tokenizer_json)) if tokenizer else None
        self._kept: OrderedDict[str, tuple[ResponseFormat, Progress]] = OrderedDict()

    def check(self, form: ResponseFormat) -> None:
        """Raise InvalidRequest for a format that cannot be followed."""
        self._known_grammars().check(form)

    def forget(self, sequence_id: str) -> None:
        self._kept.pop(sequence_id, None)

    def allowed(
        self, sequence_id: str, rule: ChoiceRule, prefix: Sequence[int], following: Sequence[int], size: int
    ) -> torch.Tensor:
        """Return [T, size] on the CPU: which tokens may come after the prefix, and after each token that follows it.

        Behind a following token that breaks the format all are, because nothing that comes there is ever used. Where
        the prefix itself breaks it, or from where the grammar is too complex, none are. So it is behind a token that
        a mask allows and that is not taken then: it may be right, and a prefix soon.
        """
        assert rule.response_format
        progress = self._progress(sequence_id, rule.response_format)
        output = list(prefix[rule.prompt_count :])
        rows: list[bytearray] = []
        are_whole: list[bool] = []
        while progress.move(output):
            rows.append(progress.allowed())
            are_whole.append(progress.is_whole)
            if len(rows) > len(following):
                break
            output.append(following[len(rows) - 1])
        allowed = torch.zeros((len(following) + 1, size), dtype=torch.bool)
        if rows:
            bits = _unpacked(rows)[:, :size]
            allowed[: len(rows), : bits.shape[1]] = bits
            ends = [one for one in rule.end_token_ids if one < size]
            allowed[: len(rows), ends] = torch.tensor(are_whole)[:, None]
            if len(rows) <= len(following):
                allowed[len(rows) :] = not (progress.error or _has(rows[-1], following[len(rows) - 1]))
        return allowed

    def _known_grammars(self) -> Grammars:
        if self._grammars is None:
            raise InvalidRequest(
                "response_format is set, and the model has no tokenizer; leave it out", field="response_format"
            )
        return self._grammars

    def _progress(self, sequence_id: str, form: ResponseFormat) -> Progress:
        kept = self._kept.get(sequence_id)
        if kept is None or kept[0] != form:
            kept = self._kept[sequence_id] = form, self._known_grammars().begin(form)
        self._kept.move_to_end(sequence_id)
        if len(self._kept) > KEPT_COUNT:
            self._kept.popitem(last=False)
        return kept[1]


def _has(bits: bytearray, token_id: int) -> bool:
    return token_id < 8 * len(bits) and bool(bits[token_id // 8] & 1 << token_id % 8)


def _unpacked(rows: Sequence[bytearray]) -> torch.Tensor:
    """Return the bits [T, 8 * bytes] of rows of bytes."""
    packed = torch.frombuffer(bytearray().join(rows), dtype=torch.uint8)
    return _EIGHT_BITS[packed.int()].view(torch.bool).view(len(rows), -1)
