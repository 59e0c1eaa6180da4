"""Incremental conversion of an output's token ids into text.

Owns the decision which characters are complete; knows nothing of prompts. At most one character is held back, so the
cost of a push is bounded.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from paceline.special_tokens import special_tokens_of

_REPLACEMENT = "\ufffd"
_CHARACTER_BYTES = 4
"""Most bytes of a character in UTF-8, and so most tokens, because each of its tokens has at least one byte."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UTF_8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Converts token ids to text one by one and holds back an incomplete character.

    The pieces and the final `flush` join to the text of all ids decoded at once, except for runs of bytes that form no
    character. Special tokens have no text.
    """

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became complete."""
        ...

    def push_all(self, token_ids: Sequence[int]) -> list[str]:
        """Add tokens; return for each the text that became complete with it."""
        ...

    def flush(self) -> str:
        """Return the text still held back, with incomplete characters as U+FFFD."""
        ...


class TokenDecoder:
    """The text of a tokenizer's ids, shared by all outputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        kinds = _decoder_kinds(tokenizer)
        self.has_byte_tokens = "ByteFallback" in kinds
        self.may_end_in_parts = "ByteLevel" in kinds
        """True when a token may be part of a character without its spelling showing it."""
        self._is_byte_level = self.may_end_in_parts and kinds <= {"ByteLevel", "Fuse"}
        self._tokenizer = tokenizer
        self._special_ids = frozenset(special_tokens_of(tokenizer))
        self._bytes: dict[int, bytes] = {}
        """Bytes of the tokens seen so far: few of the vocabulary, and they recur."""
        self.whole_texts: dict[int, str] = {}
        """Texts of those that begin and end with whole characters."""

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for a new output, which goes on with the text of the tokens `after`.

        Without them it begins a text, and many decoders drop the space that a text begins with.
        """
        return _ByteDetokenizer(self) if self._is_byte_level else _ContextDetokenizer(self, self._last_text(after))

    def _last_text(self, token_ids: Sequence[int]) -> list[int]:
        """Return the last token that has whole characters: after it no token begins a text. None if there is none."""
        return next(([one] for one in reversed(token_ids) if self._is_whole(one)), [])

    def _is_whole(self, token_id: int) -> bool:
        token = self.token(token_id)
        if token is None or (self.has_byte_tokens and _BYTE_TOKEN.fullmatch(token)):
            return False
        return not (self.may_end_in_parts and self.decode([token_id]).endswith(_REPLACEMENT))

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of a token; None for a special or unknown token, which has no text."""
        return None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds after one like it; none for a special or unknown one."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.token(token_id)
            found = self._bytes[token_id] = b"" if token is None else self._spelled(token_id, token)
        return found

    def _spelled(self, token_id: int, token: str) -> bytes:
        if self.may_end_in_parts:
            return _bytes_of(token)
        if self.has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        # Decoders drop the space before the first token, so it is read as one that follows another.
        return self.decode([token_id, token_id])[len(self.decode([token_id])) :].encode()

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class _ByteDetokenizer:
    """A detokenizer for tokens that are bytes. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._text = _UTF_8("replace")
        self._is_open = False
        """Whether the last character is incomplete."""

    def push(self, token_id: int) -> str:
        was_open, text = self._is_open, self._text.decode(self._decoder.bytes_of(token_id))
        self._is_open = bool(self._text.getstate()[0])
        if not (was_open or self._is_open):
            self._decoder.whole_texts[token_id] = text
        return text

    def push_all(self, token_ids: Sequence[int]) -> list[str]:
        whole_texts = self._decoder.whole_texts
        if not self._is_open and all(map(whole_texts.__contains__, token_ids)):
            return [*map(whole_texts.__getitem__, token_ids)]
        return [*map(self.push, token_ids)]

    def flush(self) -> str:
        self._is_open = False
        return self._text.decode(b"", final=True)


class _ContextDetokenizer:
    """A detokenizer for tokens whose text comes from the tokenizer's decoder and depends on the tokens before them.

    When the vocabulary has byte tokens, the library decodes a run of them as text if the whole run is UTF-8, and else
    as one U+FFFD per byte. Here characters are shown before the run's end. If the run breaks later, they stay shown,
    although decoding all at once would replace them.
    """

    def __init__(self, decoder: TokenDecoder, context: list[int]) -> None:
        self._decoder = decoder
        # Decoders need the ids before the open ones as context, because some drop a leading space.
        self._shown: list[int] = []
        self._context: list[int] = []
        self._context_text = ""
        self._open: list[int] = []
        self._utf_8 = _UTF_8()
        self._run_is_broken = False
        if context:
            self._move_context(context)

    def push(self, token_id: int) -> str:
        token = self._decoder.token(token_id)
        if token is None:
            return ""
        if not self._decoder.has_byte_tokens:
            return self._push_text(token_id)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return self._push_byte(token_id, bytes.fromhex(byte[1]))
        ended, self._run_is_broken = self._end_run(), False
        return ended + self._push_text(token_id)

    def push_all(self, token_ids: Sequence[int]) -> list[str]:
        return [*map(self.push, token_ids)]

    def flush(self) -> str:
        if self._decoder.has_byte_tokens:
            return self._end_run()
        return self._show() if self._open else ""

    def _push_byte(self, token_id: int, byte: bytes) -> str:
        self._open.append(token_id)
        try:
            is_whole = not self._run_is_broken and bool(self._utf_8.decode(byte))
        except UnicodeDecodeError:
            self._run_is_broken = True
        if self._run_is_broken:
            return self._end_run()
        return self._show() if is_whole else ""

    def _end_run(self) -> str:
        """Return one U+FFFD for each byte of a character that stayed incomplete."""
        if not self._open:
            return ""
        self._utf_8.reset()
        text, last = _REPLACEMENT * len(self._open), self._open[-1:]
        self._open = []
        self._move_context(last)
        return text

    def _push_text(self, token_id: int) -> str:
        self._open.append(token_id)
        may_go_on = self._decoder.may_end_in_parts and len(self._open) < _CHARACTER_BYTES
        if may_go_on and self._decoder.decode([*self._context, *self._open]).endswith(_REPLACEMENT):
            return ""
        return self._show()

    def _show(self) -> str:
        """Return the text of the open ids, which become the context of later ones."""
        text = self._decoder.decode([*self._context, *self._open])
        piece, opened = text[len(self._context_text) :], self._open
        self._open = []
        if piece or not self._shown:
            self._move_context(opened)
        else:
            # Ids without text may still matter to the decoding of the next id, and so may those before them.
            self._context = [*self._shown, *opened]
        return piece

    def _move_context(self, token_ids: list[int]) -> None:
        self._shown = self._context = token_ids
        self._context_text = self._decoder.decode(token_ids)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    decoder: Any = tokenizer.decoder
    return set(_kinds(json.loads(decoder.__getstate__()))) if decoder else set()


def _kinds(decoder: dict[str, Any]) -> list[str]:
    return [kind for one in decoder["decoders"] for kind in _kinds(one)] if "decoders" in decoder else [decoder["type"]]


def _byte_alphabet() -> dict[str, int]:
    """Return bytes by the characters that stand for them in byte-level vocabularies: themselves when printable."""
    characters = sorted(ByteLevel.alphabet())
    own = {one: ord(one) for one in characters if ord(one) < 256}
    others = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip([one for one in characters if one not in own], others, strict=True))


_BYTES = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """Return a token's bytes. As in the library, a token outside the byte alphabet is plain text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
