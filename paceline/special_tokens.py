"""Special tokens in texts: where they are, and how a text is read in which only some of them are meant.

What is not meant is hidden in secret words while a chat template works on it. Knows nothing of conversations.
"""

import json
import re
import secrets
from collections.abc import Container, Iterable, Iterator
from functools import cached_property

from tokenizers import AddedToken, Tokenizer

from paceline.chat_template import unknown_word

_MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
"""Texts of tokens that mark turns, tools and files. Some checkpoints do not call theirs special (DeepSeek-R1-Distill's
`<\uff5cUser\uff5c>`), and yet only a template may write them. Others, such as `<think>`, messages may have."""


def special_tokens_of(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    return {token_id: one for token_id, one in tokenizer.get_added_tokens_decoder().items() if one.special}


def unwritten_tokens_of(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    """Return the tokens that no author of a conversation may write: special ones, and markers."""
    markers = (item for item in tokenizer.get_added_tokens_decoder().items() if _MARKER.fullmatch(item[1].content))
    return special_tokens_of(tokenizer) | dict(markers)


class SpecialTokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens = unwritten_tokens_of(tokenizer)
        self._spelled = _any_of(one.content for one in self._tokens.values())
        # If so, text that differs from a special token's own may become that token.
        self._normalizes = tokenizer.normalizer is not None and any(one.normalized for one in self._tokens.values())

    def are_spelled(self, text: str) -> bool:
        if self._spelled and self._spelled.search(text):
            return True
        return self._normalizes and any(self.spans(text))

    def spelled_in(self, text: str) -> list[slice]:
        """Return where a text spells special tokens, in order."""
        found = [slice(*one.span()) for one in self._spelled.finditer(text)] if self._spelled else []
        if not self._normalizes:
            return found
        # What a match leaves is looked at by itself: the tokenizer may see a longer token there.
        return sorted([*found, *self._normalized_spans(text, found)], key=lambda one: one.start)

    def _normalized_spans(self, text: str, found: Iterable[slice]) -> Iterator[slice]:
        hidden = _replaced(text, ((one, "\ufdd0" * (one.stop - one.start)) for one in found))
        return (span for _, span in self.spans(hidden))

    def spans(self, text: str) -> Iterator[tuple[int, slice]]:
        """Yield the ids and places of a text's special tokens. A place includes the spaces that its token absorbs."""
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            one = self._tokens.get(token_id)
            # The unknown token may be special and then stands for text that is not its own.
            if one and self._normal(text[start:end].strip()) == self._normal(one.content.strip()):
                yield token_id, slice(start, end)

    def ids_in(self, text: str) -> list[int]:
        return [token_id for token_id, _ in self.spans(text)]

    def may_be_part(self, text: str, is_read: bool) -> bool:
        """Return whether a text could be a part of a special token, with what a template puts beside it.

        It could at its beginning or end and, unless templates read it, as a whole.
        """
        return any(self.part_places(text, is_read))

    def part_places(self, text: str, is_read: bool) -> Iterator[slice]:
        """Yield what to hide of a text so that it is no part of a special token: a character at each end, or all."""
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        normal = self._normal(text[start:end]) if self._normalizes else text[start:end]
        if not normal:
            return
        if normal in self._joined:
            if not is_read:
                yield slice(start, end)
            return
        longest = min(len(normal), self._longest)
        if normal[0] in self._characters and any(normal[:count] in self._ends for count in range(1, longest)):
            yield slice(start, start + 1)
        if normal[-1] in self._characters and any(normal[-count:] in self._beginnings for count in range(1, longest)):
            yield slice(end - 1, end)

    @cached_property
    def _contents(self) -> list[str]:
        contents = [one.content.strip() for one in self._tokens.values()]
        return [self._normal(one) for one in contents] if self._normalizes else contents

    @cached_property
    def _joined(self) -> str:
        return "\n".join(self._contents)

    @cached_property
    def _characters(self) -> frozenset[str]:
        return frozenset(self._joined)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._contents), default=0)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(one[:count] for one in self._contents for count in range(1, len(one)))

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(one[count:] for one in self._contents for count in range(1, len(one)))

    def _normal(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    @cached_property
    def plain(self) -> "PlainTokenizer":
        return PlainTokenizer(self._tokenizer)


class Hiding:
    """Secret words for what must not become special tokens, and what they stand for."""

    def __init__(self, special: SpecialTokens) -> None:
        self._special = special
        self._secret = secrets.token_hex(16)
        self._hidden: list[str] = []

    def spelled(self, text: str, is_read: bool) -> str:
        """Hide the special tokens that a text spells."""
        return self._without(text, self._special.spelled_in(text))

    def parts(self, text: str, is_read: bool) -> str:
        """Hide them, and what could become a part of one."""
        places = [*self._special.spelled_in(text), *self._special.part_places(text, is_read)]
        return self._without(text, _merged(places))

    def _without(self, text: str, places: Iterable[slice]) -> str:
        return _replaced(text, ((place, self._hide(text[place])) for place in places))

    def _hide(self, text: str) -> str:
        self._hidden.append(text)
        return self._word(str(len(self._hidden) - 1))

    def _word(self, number: str) -> str:
        """Return a word that comes whole through whatever writes it: JSON, escapes, or the form that Python prints."""
        return f"x{self._secret}n{number}x"

    def shown(self, text: str) -> str:
        """Return a text with what its words stand for in their places."""
        return re.sub(self._word(r"(\d+)"), lambda found: self._hidden[int(found[1])], text)

    def are_shown(self, text: str) -> bool:
        """Return whether the words came through a template whole: one could have changed their letters."""
        return self._secret not in self.shown(text).lower()

    def encode(self, text: str) -> list[int]:
        """Encode a text in which only the special tokens are meant that are not hidden."""
        plain = self._special.plain
        # The tokenizer itself finds those.
        meant = _replaced(text, ((place, plain.words[one]) for one, place in self._special.spans(text)))
        return plain.encode(self.shown(meant))


class PlainTokenizer:
    """A tokenizer that reads special tokens as plain text. Secret words stand for the special tokens that are meant."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        secret, special = secrets.token_hex(16), unwritten_tokens_of(tokenizer)
        self.words = {token_id: unknown_word(secret, token_id) for token_id in special}
        self._tokenizer = _with_special(tokenizer, special)
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


def _with_special(tokenizer: Tokenizer, token_ids: Container[int]) -> Tokenizer:
    """Return a copy in which the added tokens of these ids are special."""
    content = json.loads(tokenizer.to_str())
    for one in content["added_tokens"]:
        one["special"] = one["special"] or one["id"] in token_ids
    return Tokenizer.from_str(json.dumps(content))


def _merged(places: Iterable[slice]) -> list[slice]:
    """Return the places in order, those that overlap as one."""
    merged: list[slice] = []
    for place in sorted(places, key=lambda one: one.start):
        if merged and place.start < merged[-1].stop:
            last = merged.pop()
            place = slice(last.start, max(last.stop, place.stop))
        merged.append(place)
    return merged


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
