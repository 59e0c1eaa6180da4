"""Tokenization of prompts, with or without a chat template.

Works from `TokenizerFiles`, so it needs neither torch nor a checkpoint. Knows nothing of models.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from paceline.errors import IncompatiblePair, InvalidRequest, ModelNotUsable
from paceline.types import Prompt, Text, TokenIds, TokenizerFiles

MAX_SHRINKAGE = 4
"""Most characters that normalization composes into one. A tokenizer that drops spaces, or one that maps an unknown word
to a single token, may shrink a text more. A text of little else counts as too long although it might fit."""
_TAIL_TOKENS = 8
"""Tokens of a prompt that decide how a text after it is split: words and their spaces are shorter."""


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of the token-to-id table without added tokens: those for roles, tools and ends.

    Only ids pass between draft and target. So two tokenizers that give every id the same text can work as a pair, even
    if they split prompts differently. Families add tokens from one version to the next, and a draft may be of another
    version than its target: an added token that only one of them knows costs drafts, and no output.
    """
    added = tokenizer.get_added_tokens_decoder()
    known = tokenizer.get_vocab(with_added_tokens=False).items()
    table = sorted(((text, one) for text, one in known if one not in added), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def check_same_tokenizer(draft: str, draft_fingerprint: str, target: str, target_fingerprint: str) -> None:
    """Raise IncompatiblePair unless every token id, but those of added tokens, means the same text to both models."""
    if draft_fingerprint != target_fingerprint:
        raise IncompatiblePair(
            f"draft {draft!r} and target {target!r} have different tokenizers "
            f"({draft_fingerprint[:12] or 'none'} and {target_fingerprint[:12] or 'none'}): the draft's token ids "
            "would mean other text to the target; choose a draft of the target's family"
        )


class TextCodec:
    """A tokenizer with its chat template."""

    def __init__(self, files: TokenizerFiles) -> None:
        try:
            self.tokenizer = Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ModelNotUsable(f"the tokenizer cannot be read: {error}") from error
        # A checkpoint may carry its training limits; prompts are checked for length, never cut.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._special_tokens = special_tokens_of(self.tokenizer)
        self._special = _any_of(one.content for one in self._special_tokens.values())
        # If so, text that differs from a special token's own may become that token.
        self._normalizes = self.tokenizer.normalizer is not None and any(
            one.normalized for one in self._special_tokens.values()
        )
        try:
            self._template_tokens: Mapping[str, str] = json.loads(files.special_tokens_json)
            self._template = _environment().from_string(files.chat_template) if files.chat_template else None
        except (ValueError, TemplateError) as error:
            raise ModelNotUsable(f"the chat template cannot be read: {error}") from error

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @cached_property
    def token_count(self) -> int:
        """Number of ids that texts may have, gaps included: the largest one and those before it."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def most_characters(self, token_count: int) -> int:
        """Return the characters of the longest text that can fit into so many tokens."""
        return MAX_SHRINKAGE * self._longest_token_characters * token_count

    @cached_property
    def _longest_token_characters(self) -> int:
        """The length of the longest token in characters of normalized text."""
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)), default=0)

    def encode(self, prompt: Prompt) -> list[int]:
        """Turn a prompt of any form into token ids.

        Special tokens come from the template, or from plain text without one. Nothing in a user's message becomes one.
        """
        if isinstance(prompt, TokenIds):
            return list(prompt.values)
        if isinstance(prompt, Text):
            return self._encode(prompt.value, add_special_tokens=True)
        if self._spells_special(prompt.value):
            return self._encode_forged(prompt.value)
        return self._encode(self._render(prompt.value), add_special_tokens=False)

    def encode_continuation(self, text: str, prompt: Sequence[int]) -> list[int]:
        """Turn a text that is to follow a prompt into the token ids that a model would write it with.

        What a tokenizer puts before a text, such as a first token or a space, is left out, and a space of the text's
        own stays: the end of the prompt stands before it. Where a tokenizer would join the end of the prompt and the
        beginning of the text into one token, the text is read alone. Nothing in it becomes a special token.
        """
        before = self.tokenizer.decode(list(prompt[-_TAIL_TOKENS:]), skip_special_tokens=True)
        own, joined = self._encode_output(before), self._encode_output(before + text)
        return joined[len(own) :] if joined[: len(own)] == own else self._encode_output(text)

    def _encode_output(self, text: str) -> list[int]:
        if self._spells_special(text):
            return self._plain_tokenizer.encode(text)
        return self._encode(text, add_special_tokens=False)

    def _spells_special(self, message: str) -> bool:
        if self._special and self._special.search(message):
            return True
        return self._normalizes and any(self._special_spans(message))

    def _encode_forged(self, message: str) -> list[int]:
        """Encode a message that spells special tokens. Those become plain text; the template's stay special."""
        secret = secrets.token_hex(16)
        spelled: list[str] = []

        def hide(text: str) -> str:
            spelled.append(text)
            return _unknown_word(secret, len(spelled) - 1)

        assert self._special
        hidden = self._special.sub(lambda found: hide(found[0]), message)
        if self._normalizes:
            hidden = _replaced(hidden, ((span, hide(hidden[span])) for _, span in self._special_spans(hidden)))
        rendered = self._render(hidden)
        # The remaining special tokens are the template's; the tokenizer itself locates them.
        plain = self._plain_tokenizer
        meant = _replaced(rendered, ((span, plain.words[one]) for one, span in self._special_spans(rendered)))
        return plain.encode(re.sub(_unknown_word(secret, r"(\d+)"), lambda found: spelled[int(found[1])], meant))

    def _special_spans(self, text: str) -> Iterator[tuple[int, slice]]:
        """Yield the ids and places of a text's special tokens. A place includes the spaces that its token absorbs."""
        encoding = self.tokenizer.encode_batch([text], add_special_tokens=False)[0]
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            one = self._special_tokens.get(token_id)
            # The unknown token may be special and then stands for text that is not its own.
            if one and self._normal(text[start:end].strip()) == self._normal(one.content.strip()):
                yield token_id, slice(start, end)

    def _normal(self, text: str) -> str:
        normalizer = self.tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    @cached_property
    def _plain_tokenizer(self) -> "_PlainTokenizer":
        return _PlainTokenizer(self.tokenizer)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A megabyte takes seconds, and `encode_batch` lets other threads run meanwhile, unlike `encode`.
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def _render(self, message: str) -> str:
        if self._template is None:
            raise InvalidRequest(
                "user_message is set, but the target model has no chat template; send text instead",
                field="user_message",
            )
        messages = [{"role": "user", "content": message}]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._template_tokens)
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses this message: {error}", field="user_message") from error


class _PlainTokenizer:
    """A tokenizer that reads special tokens as plain text. Secret words stand for the special tokens that are meant."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        secret, special = secrets.token_hex(16), special_tokens_of(tokenizer)
        self.words = {token_id: _unknown_word(secret, token_id) for token_id in special}
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.add_tokens(
            [
                AddedToken(self.words[token_id], lstrip=one.lstrip, rstrip=one.rstrip, normalized=False)
                for token_id, one in special.items()
            ]
        )
        self._meant = {self._tokenizer.token_to_id(word): token_id for token_id, word in self.words.items()}

    def encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        return [self._meant.get(one, one) for one in ids]


def _unknown_word(secret: str, number: int | str) -> str:
    """Return a word that nobody can have written. Noncharacters at its ends keep a vocabulary's tokens out of it."""
    return f"\ufdd0{secret}{number}\ufdd0"


def special_tokens_of(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    return {token_id: one for token_id, one in tokenizer.get_added_tokens_decoder().items() if one.special}


def _replaced(text: str, parts: Iterable[tuple[slice, str]]) -> str:
    """Return the text with the parts' words in their places, which must be in order."""
    pieces, at = [], 0
    for place, word in parts:
        pieces += [text[at : place.start], word]
        at = place.stop
    return "".join((*pieces, text[at:]))


def _any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern of the words, longest first; None without words."""
    pattern = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return re.compile(pattern) if pattern else None


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates expect, sandboxed because a template comes with the checkpoint."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise_template_error
    return environment


def _raise_template_error(message: Any) -> NoReturn:
    raise TemplateError(str(message))
