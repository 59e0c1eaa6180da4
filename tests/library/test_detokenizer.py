"""Text of outputs, token by token: exact, and at a cost that does not grow."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from paceline.detokenizer import TokenDecoder
from paceline.measure.prompts import read_text_codec
from tests.fakes.tokenizers import BYTE_COUNT, DECODERS, WORDS, byte_tokenizer, word_tokenizer

BYTES = byte_tokenizer()
SOME_IDS = st.one_of(
    st.lists(st.integers(0, BYTE_COUNT)),
    st.text().map(lambda text: BYTES.encode(text).ids),
    st.text(alphabet="aé😀\ufffd").map(lambda text: BYTES.encode(text).ids),
)
OTHERS = {name: word_tokenizer(decoder) for name, decoder in DECODERS.items()}
FIRST_BYTE = len(WORDS)
WORD_IDS = st.integers(0, FIRST_BYTE - 1) | st.integers(FIRST_BYTE + BYTE_COUNT, FIRST_BYTE + BYTE_COUNT + 2)

TEXT_IDS = st.integers(0, FIRST_BYTE - 1)


def as_bytes(content: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in content]


def texts(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    """Return each token's piece, and the last flush."""
    detokenizer = TokenDecoder(tokenizer).detokenizer()
    return [*(detokenizer.push(one) for one in token_ids), detokenizer.flush()]


def joined(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return "".join(texts(tokenizer, token_ids))


def at_once(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", OTHERS)
@given(st.lists(TEXT_IDS, min_size=1), st.lists(TEXT_IDS))
@example([0], [1])
def test_what_goes_on_with_a_text_joins_to_the_text_of_both(name: str, before: list[int], after: list[int]) -> None:
    detokenizer = TokenDecoder(OTHERS[name]).detokenizer(before)
    rest = [*(detokenizer.push(one) for one in after), detokenizer.flush()]
    assert joined(OTHERS[name], before) + "".join(rest) == at_once(OTHERS[name], [*before, *after])


@pytest.mark.parametrize("ending", [as_bytes("é😀".encode()), [FIRST_BYTE + BYTE_COUNT + 1]])
def test_a_text_that_ends_with_bytes_or_a_special_token_is_gone_on_with(ending: list[int]) -> None:
    before, after = [0, *ending], [1, 0]
    detokenizer = TokenDecoder(OTHERS["llama"]).detokenizer(before)
    rest = "".join(map(detokenizer.push, after)) + detokenizer.flush()
    assert joined(OTHERS["llama"], before) + rest == at_once(OTHERS["llama"], [*before, *after])


@given(SOME_IDS)
def test_pieces_join_to_the_whole_decoded_at_once(token_ids: list[int]) -> None:
    assert joined(BYTES, token_ids) == at_once(BYTES, token_ids)


@given(st.lists(st.integers(0, 2047)))
def test_so_do_those_of_the_builtin_pair(token_ids: list[int]) -> None:
    assert joined(BUILTIN, token_ids) == at_once(BUILTIN, token_ids)


BUILTIN = read_text_codec("builtin:target", "builtin:draft").tokenizer


@pytest.mark.parametrize("name", OTHERS)
@given(st.lists(WORD_IDS | st.text(max_size=3)))
@example([0, 1])
@example([0, 0, "é", 1])
@example([7, "😀"])
def test_so_do_those_of_other_decoders_where_bytes_are_characters(name: str, parts: list[int | str]) -> None:
    token_ids = [one for part in parts for one in ([part] if isinstance(part, int) else as_bytes(part.encode()))]
    assert joined(OTHERS[name], token_ids) == at_once(OTHERS[name], token_ids)


@given(st.lists(st.tuples(st.integers(0xF5, 0xFF), st.binary(max_size=6), WORD_IDS)))
def test_so_do_those_of_bytes_that_are_no_characters_from_the_first_on(runs: list[tuple[int, bytes, int]]) -> None:
    token_ids = [one for first, rest, word in runs for one in (*as_bytes(bytes([first, *rest])), word)]
    assert joined(OTHERS["llama"], token_ids) == at_once(OTHERS["llama"], token_ids)


@given(st.lists(st.text(alphabet="aé😀", max_size=3).map(str.encode) | st.binary(max_size=4)))
@example(["你".encode(), b"\xe5A", b""])
def test_what_was_shown_of_a_run_of_bytes_stays_when_it_breaks_and_the_rest_is_a_replacement_a_byte(
    runs: list[bytes],
) -> None:
    """Only here decoding all at once differs: it takes the characters back."""
    token_ids = [one for run in runs for one in (*as_bytes(run), WORDS.index("b"))]
    assert joined(OTHERS["gemma"], token_ids) == "".join(f"{shown_of(run)}b" for run in runs)


def shown_of(run: bytes) -> str:
    try:
        return run.decode()
    except UnicodeDecodeError as error:
        return run[: error.start].decode() + "\ufffd" * (len(run) - error.start)


def test_a_run_of_bytes_shows_each_character_as_soon_as_it_is_whole() -> None:
    llama = OTHERS["llama"]
    assert texts(llama, as_bytes("a\n你".encode())) == ["a", "\n", "", "", "你", ""]
    assert texts(llama, [1, *as_bytes("你".encode() + b"\xe5A\x80"), 2]) == [
        *("a", "", "", "你", "", "\ufffd\ufffd", "\ufffd", "b", "")
    ]


@given(st.text(alphabet="aé😀\u4e2d"))
def test_no_piece_splits_a_character(text: str) -> None:
    assert "\ufffd" not in "".join(texts(BYTES, BYTES.encode(text).ids))


def test_characters_that_are_whole_wait_for_none_that_is_not() -> None:
    joint = Tokenizer.from_str(BYTES.to_str())
    joint.add_tokens(["aâĺ"])  # a, and the first two bytes of three
    (last,) = (BYTES.encode("☀").ids[2:],)
    assert texts(joint, [joint.get_vocab_size() - 1, *last]) == ["a", "☀", ""]
    assert texts(BYTES, BYTES.encode("\ufffda").ids) == ["", "", "\ufffd", "a", ""]


class CountedTokenizer:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded_count = 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.decoded_count += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


MIXED = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
SPECIAL = FIRST_BYTE + BYTE_COUNT + 1


@pytest.mark.review
@pytest.mark.parametrize("run", [(FIRST_BYTE + 0x80,), (FIRST_BYTE + 0xF0, FIRST_BYTE + 0x9F), (7,), (SPECIAL,), (9,)])
@pytest.mark.parametrize("decoder", [*DECODERS.values(), MIXED])
def test_a_token_costs_the_same_however_many_complete_no_text(
    decoder: decoders.Decoder | None, run: tuple[int, ...]
) -> None:
    """review C5: each token was decoded together with all open ones."""
    counted: Any = CountedTokenizer(word_tokenizer(decoder))
    detokenizer = TokenDecoder(counted).detokenizer()
    for token_id in run * 100:
        before = counted.decoded_count
        detokenizer.push(token_id)
        assert counted.decoded_count - before <= 24


@pytest.mark.review
def test_nothing_is_decoded_again_for_a_byte_level_tokenizer() -> None:
    """review C5"""
    counted: Any = CountedTokenizer(BYTES)
    detokenizer = TokenDecoder(counted).detokenizer()
    assert "".join(map(detokenizer.push, range(BYTE_COUNT + 1)))
    assert counted.decoded_count == 0


@given(st.text(alphabet=" aé😀\u4e2d"))
def test_a_decoder_of_several_steps_of_which_one_is_byte_level_is_exact_for_whole_characters(text: str) -> None:
    mixed = Tokenizer.from_str(BYTES.to_str())
    mixed.decoder = MIXED
    token_ids = BYTES.encode(text).ids
    assert joined(mixed, token_ids) == at_once(mixed, token_ids)


def test_the_bytes_of_tokens_that_are_bytes_join_to_those_of_their_text() -> None:
    for tokenizer in (BYTES, BUILTIN):
        decoder, text = TokenDecoder(tokenizer), "Zürich 🙂\n a"
        assert b"".join(map(decoder.bytes_of, tokenizer.encode(text, add_special_tokens=False).ids)) == text.encode()
    assert TokenDecoder(BYTES).bytes_of(BYTE_COUNT) == TokenDecoder(BYTES).bytes_of(BYTE_COUNT + 1) == b""


@pytest.mark.parametrize("name", [one for one in DECODERS if one != "bpe"])
@given(st.lists(WORD_IDS, min_size=1))
def test_the_bytes_of_other_tokens_are_what_they_add_to_an_output(name: str, token_ids: list[int]) -> None:
    """Past the first one, whose space a decoder may drop. With suffixes, a token's space depends on the one before."""
    decoder = TokenDecoder(OTHERS[name])
    for byte in (0, 0x41, 0xC3, 0xFF):
        wanted = bytes([byte]) if decoder.has_byte_tokens else f"<0x{byte:02X}>".encode()
        assert decoder.bytes_of(FIRST_BYTE + byte).strip() == wanted.strip()
    text = at_once(OTHERS[name], [token_ids[0], *token_ids, token_ids[0]])
    own = b"".join(map(decoder.bytes_of, token_ids)).decode()
    assert own.strip() in text
