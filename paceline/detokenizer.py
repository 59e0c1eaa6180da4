"""Turn the token ids of an output into text as they come. Owns which characters are complete; knows nothing of prompts.

A push costs the same however much is held back: what can be held is one character.
"""

import codecs
import json
import re
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from paceline.text import special_tokens_of

_REPLACEMENT = "\ufffd"
_CHARACTER_BYTES = 4
"""Most bytes of a character in UTF-8, and so most tokens: an open one has at least a byte in each."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UTF_8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Gives the text of token ids, one by one, holding back a character that is still incomplete.

    The pieces, with the last `flush`, join to the text of all ids decoded at once, but for runs of bytes
    that make no character. Special tokens have no text.
    """

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became complete."""
        ...

    def flush(self) -> str:
        """Return what is still held back, incomplete characters as U+FFFD."""
        ...


class TokenDecoder:
    """What a tokenizer's ids are as text: one for all outputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        kinds = _decoder_kinds(tokenizer)
        self.has_byte_tokens = "ByteFallback" in kinds
        self.may_end_in_parts = "ByteLevel" in kinds
        """A token may be a part of a character, without saying so."""
        self._is_byte_level = self.may_end_in_parts and kinds <= {"ByteLevel", "Fuse"}
        self._tokenizer = tokenizer
        self._special_ids = frozenset(special_tokens_of(tokenizer))
        self._bytes: dict[int, bytes] = {}
        """Of the tokens that were met: they are few of the vocabulary, and come again."""

    def detokenizer(self) -> Detokenizer:
        """Begin an output."""
        return _ByteDetokenizer(self) if self._is_byte_level else _ContextDetokenizer(self)

    def token(self, token_id: int) -> str | None:
        """Return how the vocabulary spells a token; None where decoding leaves it out: special, or unknown."""
        return None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """Return what a token of a byte-level vocabulary stands for."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = _bytes_of(self.token(token_id) or "")
        return found

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class _ByteDetokenizer:
    """Of tokens that are bytes: their text is that of all bytes, U+FFFD in place of what is not UTF-8."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._text = _UTF_8("replace")

    def push(self, token_id: int) -> str:
        return self._text.decode(self._decoder.bytes_of(token_id))

    def flush(self) -> str:
        return self._text.decode(b"", final=True)


class _ContextDetokenizer:
    """Of tokens that have their text from the tokenizer's decoder, which looks at what is before them.

    Where the vocabulary spells bytes, a run of such tokens is text if all of it is UTF-8, and else one U+FFFD a byte.
    Whether it is shows at its end; its characters are not held until then. So of a run that breaks later on, those that
    were shown stay, which decoding all at once would take back.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        # Ids before the open ones give the decoder its left context: some drop a leading space.
        self._shown: list[int] = []
        self._context: list[int] = []
        self._context_text = ""
        self._open: list[int] = []
        self._utf_8 = _UTF_8()
        self._run_is_broken = False

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
        """Give up a character whose bytes did not all come."""
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
        """Return the text of what is open, which is the context of what follows."""
        text = self._decoder.decode([*self._context, *self._open])
        piece, opened = text[len(self._context_text) :], self._open
        self._open = []
        if piece or not self._shown:
            self._move_context(opened)
        else:
            # They have no text, and may matter to the next all the same; those before them matter as well.
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
    """Bytes by the characters that byte-level vocabularies write them with: itself where that can be printed."""
    characters = sorted(ByteLevel.alphabet())
    own = {one: ord(one) for one in characters if ord(one) < 256}
    others = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip([one for one in characters if one not in own], others, strict=True))


_BYTES = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """As the library: a token that is not written in that alphabet is plain text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
