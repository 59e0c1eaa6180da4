"""What may follow in an output that has a response format: the tokens that a grammar allows after a prefix.

Owns the library's limits; `format_work` owns what is counted before it begins. `llguidance` parses; nothing here knows
of logits, models or requests.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from paceline.errors import InvalidRequest
from paceline.format_work.grammars import check_grammar
from paceline.format_work.schemas import SchemaWork
from paceline.types import ResponseFormat

MAX_FORMAT_CHARACTERS = 65536
COMPILED_COUNT = 16
"""Compiled formats that are kept: the largest take 40 to 80 MiB."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
MAX_DIVISORS = 10_000
"""Most that the digits of all `multipleOf` of a schema come to: the library's work grows with them, without a limit."""
STACK_BYTES = 256 << 20
"""Only what a compilation touches of it takes memory."""
_beginning = threading.Lock()
"""Held while a thread with such a stack is made: the size is the process's, and another would put it back meanwhile."""
_REASON_CHARACTERS = 200
_SCHEMA = "%json"
"""Stands before a JSON Schema within a grammar."""
_END = "\ufdd0end"
"""Spelling of a token of our own that stands for the end of an output: a model may have several end tokens, or none."""


class Grammars:
    """The compiled formats of the outputs of one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the vocabulary, which takes a second for a large one. One that cannot be read refuses every format."""
        self._vocabulary: LLTokenizer | None = None
        self._failure = ""
        self._special_bits: dict[int, int] = {}
        """By the byte of a mask that has any, the bits of special tokens."""
        try:
            self._vocabulary = tokens = _vocabulary(tokenizer)
            for one in filter(tokens.is_special_token, tokenizer.get_added_tokens_decoder()):
                self._special_bits[one // 8] = self._special_bits.get(one // 8, 0) | 1 << one % 8
        except ValueError as error:
            self._failure = f"the model's tokenizer cannot be followed: {error}"
        self._compiled = lru_cache(COMPILED_COUNT)(self._compile)

    def begin(self, form: ResponseFormat) -> "Progress":
        """Return the beginning of an output. Raise InvalidRequest for a format that cannot be compiled."""
        tokens = self._tokens
        return Progress(self._compiled(form), lambda: self._compile(form), tokens, self._special_bits, self._longest)

    def check(self, form: ResponseFormat) -> None:
        """Raise InvalidRequest for a format that cannot be compiled, or that no text satisfies."""
        progress = self.begin(form)
        if not any(progress.allowed()) and not progress.is_whole:
            is_complex = progress.error and not progress.error.startswith("NoExtension")
            raise _refusal(progress.error if is_complex else "no text satisfies it")

    @property
    def _tokens(self) -> LLTokenizer:
        if self._vocabulary is None:
            raise _refusal(self._failure)
        return self._vocabulary

    def _longest(self, text: bytes) -> int | None:
        """Return the longest token that a text begins with; None: no token has its first byte."""
        ends = range(min(len(text), max(map(len, self._ids_by_bytes), default=0)), 0, -1)
        return next((self._ids_by_bytes[text[:end]] for end in ends if text[:end] in self._ids_by_bytes), None)

    @cached_property
    def _ids_by_bytes(self) -> dict[bytes, int]:
        """Tokens by their bytes, without special ones. Read where it is needed, for that takes time."""
        tokens = self._tokens
        plain = (one for one in reversed(range(tokens.vocab_size)) if not tokens.is_special_token(one))
        return {tokens.decode_bytes([one]): one for one in plain}

    def _compile(self, form: ResponseFormat) -> LLMatcher:
        try:
            tokens, grammar = self._tokens, _grammar(form)
        except ValueError as error:
            raise _refusal(str(error)) from error
        matcher = _on_deep_stack(lambda: LLMatcher(tokens, grammar, log_level=0, limits=LIMITS))
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return matcher


def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """Return the tokenizer as the parser reads it. Raise ValueError when it cannot read it."""
    own = Tokenizer.from_str(tokenizer.to_str())
    own.no_truncation()
    own.no_padding()
    known = own.get_vocab(with_added_tokens=True).values()
    own.add_special_tokens([AddedToken(_END, normalized=False)])
    end_id = own.token_to_id(_END)
    if end_id in known:
        raise ValueError("its ids have gaps")
    try:
        return LLTokenizer(own.to_str(), eos_token=end_id)
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # which has no name to import, and is no Exception
            raise ValueError("the library fails over it") from error
        raise


class Progress:
    """How far an output has come in its grammar. It can go back: what it allows depends on the output alone."""

    def __init__(
        self,
        beginning: LLMatcher,
        compile: Callable[[], LLMatcher],
        tokens: LLTokenizer,
        special_bits: Mapping[int, int],
        longest: Callable[[bytes], int | None],
    ) -> None:
        """`longest` returns the longest token that a text begins with, if there is one."""
        self._beginning = beginning
        self._compile = compile
        self._tokens = tokens
        self._special_bits = special_bits
        self._longest = longest
        self._matcher = beginning.deep_copy()
        """Goes back, so it is asked for no mask. A matcher keeps its last one, by the lexer's state and the number of
        lexemes, and does not forget it when it goes back: behind a wrong draft it may give that one again."""
        self._read: list[int] = []
        self._asked: LLMatcher | None = None
        """A copy that is asked for masks, and never goes back."""
        self._asked_count = 0
        """Tokens that it has read."""

    @property
    def is_whole(self) -> bool:
        """Whether the output may end here."""
        return not self.error and self._matcher.is_accepting()

    @property
    def error(self) -> str:
        """Why what follows cannot be said: the grammar is too complex here. Empty: it can."""
        return self._matcher.get_error() if self._matcher.is_error() else ""

    def move(self, output: Sequence[int]) -> bool:
        """Go to the end of an output; return False if it breaks the format, or if `error` says why nobody can tell.

        Where it breaks the format, this stands before the first wrong token.
        """
        common = _common_length(self._read, output)
        if common < len(self._read):
            if self._matcher.rollback(len(self._read) - common):
                del self._read[common:]
                if common < self._asked_count:
                    self._asked = None
            else:
                self._restart(self._beginning.deep_copy())
        self._go_on(output)
        if self.error:
            # What copies of a matcher have learned adds up to its limits, so a new one may have room.
            self._restart(self._compile())
            self._go_on(output)
        return len(self._read) == len(output) and not self.error

    def allowed(self) -> bytearray:
        """Return a bit for each token id, those of the tokens that may follow set; the lowest bit of a byte is first.

        Where `error` says why, none is set.
        """
        if not self.error:
            bits, output = self._bits(), self._read
            if not self.error:
                return bits
            self._restart(self._compile())
            self._go_on(output)
        bits = self._bits()
        return bytearray(len(bits)) if self.error else bits

    def _bits(self) -> bytearray:
        asked = self._asked = self._gone_on()
        self._asked_count = len(self._read)
        bits = bytearray(asked.compute_bitmask())
        if asked.is_error():
            self._matcher = asked
        _clear(bits, self._tokens.eos_token)
        for place, special in self._special_bits.items():
            if bits[place] & special:
                self._clear_special(bits, place, special)
        if bits.count(0) == len(bits) - 1:
            self._correct_forced(bits, asked)
        return bits

    def _correct_forced(self, bits: bytearray, asked: LLMatcher) -> None:
        """Put another token in the place of one that is allowed alone and does not write what must come.

        The library has the tokenizer write a text that alone can follow, which a normalizer may make another text.
        """
        place = len(bits) - len(bits.lstrip(b"\0"))
        token_id, text = 8 * place + bits[place].bit_length() - 1, asked.compute_ff_bytes()
        is_one = bits[place].bit_count() == 1 and not self._tokens.is_special_token(token_id)
        written = self._tokens.decode_bytes([token_id])
        if not is_one or text.startswith(written) or written.startswith(text):
            return
        _clear(bits, token_id)
        if (longest := self._longest(text)) is not None:
            bits[longest // 8] |= 1 << longest % 8

    def _gone_on(self) -> LLMatcher:
        """Return the matcher that is asked, at the end of what was read; a new one if the old one cannot come there."""
        rest = self._read[self._asked_count :]
        if self._asked and self._asked.try_consume_tokens(rest) == len(rest):
            return self._asked
        return self._matcher.deep_copy()

    def _clear_special(self, bits: bytearray, place: int, special: int) -> None:
        """Clear those special tokens of a byte that are not taken.

        A complement has all bytes, those too that stand for special tokens in a mask, and none of these is taken.
        """
        reader = self._matcher.deep_copy()
        for token_id in range(8 * place, 8 * place + 8):
            if bits[place] & special & 1 << token_id % 8 and not reader.validate_tokens([token_id]):
                _clear(bits, token_id)

    def _restart(self, matcher: LLMatcher) -> None:
        self._matcher, self._read, self._asked = matcher, [], None

    def _go_on(self, output: Sequence[int]) -> None:
        rest = list(output[len(self._read) :])
        known = next((n for n, one in enumerate(rest) if not self._is_known(one)), len(rest))
        taken_count = self._matcher.try_consume_tokens(rest[:known])
        self._read += rest[:taken_count]
        if taken_count < known:
            self._matcher = self._or_worn_out()

    def _or_worn_out(self) -> LLMatcher:
        """Return the matcher, or one in error if that is why it took a token for a wrong one.

        All copies share what they have learned. Once that has come to its limits, none takes any token, and none says
        why before it is asked for a mask.
        """
        asked = self._matcher.deep_copy()
        asked.compute_bitmask()
        return asked if asked.is_error() else self._matcher

    def _is_known(self, token_id: int) -> bool:
        return token_id < self._tokens.vocab_size and token_id != self._tokens.eos_token


def _clear(bits: bytearray, token_id: int) -> None:
    bits[token_id // 8] &= ~(1 << token_id % 8)


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    if list(other[: len(one)]) == one:  # nearly always: an output only grows
        return len(one)
    return next(index for index, token_id in enumerate(one) if index >= len(other) or token_id != other[index])


def _on_deep_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    """Return the result of `work`, which may call itself as deeply as the longest grammar has rules.

    On an ordinary stack 5,000 rules that each name the next end the process.
    """
    made: list[LLMatcher] = []
    thread = threading.Thread(target=lambda: made.append(work()))
    with _beginning:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return made.pop()


def _grammar(form: ResponseFormat) -> str:
    """Return the format as `llguidance` reads it. Raise InvalidRequest, or ValueError with what is wrong."""
    given = [one for one in (form.json_schema, form.regex, form.grammar) if one]
    if len(given) != 1:
        raise _refusal(f"{len(given)} of json_schema, regex and grammar are set; set one")
    if len(given[0]) > MAX_FORMAT_CHARACTERS:
        raise _refusal(f"it has {len(given[0])} characters; give {MAX_FORMAT_CHARACTERS} at most")
    if form.regex:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.grammar:
        return LLMatcher.grammar_from_lark(_checked_grammar(form.grammar))
    return LLMatcher.grammar_from_json_schema(_checked_schema(form.json_schema, [], SchemaWork()))


def _checked_grammar(text: str) -> str:
    """Return a grammar whose schemas are checked as others are, each written anew where it stands."""
    before, *parts = text.split(_SCHEMA)
    written, divisors, work = [before], list[int](), SchemaWork()
    for part in parts:
        part = part.lstrip()
        try:
            _, end = json.JSONDecoder().raw_decode(part)
        except RecursionError as error:
            raise _refusal("grammar has a schema that is nested too deeply") from error
        written += [_SCHEMA, " ", _checked_schema(part[:end], divisors, work), part[end:]]
    check_grammar(grammar := "".join(written))
    return grammar


def _checked_schema(text: str, divisors: list[int], work: SchemaWork) -> str:
    """Return a schema's text. It is written anew: the library puts it into a larger text, where it could end early.

    Digits of its `multipleOf` are added to `divisors`, and what else it takes to `work`: those of a format add up.
    """

    def note(one: dict[str, Any]) -> dict[str, Any]:
        if isinstance(divisor := one.get("multipleOf"), int | float):
            divisors.append(_digits(divisor))
        return one

    try:
        schema = json.loads(text, object_hook=note)
        written = json.dumps(schema)
    except RecursionError as error:
        raise _refusal("json_schema is nested too deeply") from error
    if sum(divisors) > MAX_DIVISORS:
        raise _refusal(f"the digits of all multipleOf come to {sum(divisors)}; {MAX_DIVISORS} are taken at most")
    work.add(schema)
    return written


def _digits(number: float) -> int:
    """Return the number without its point and the zeros around it."""
    digits = str(number).lower().partition("e")[0].replace(".", "").strip("-0")
    return int(digits) if digits.isdecimal() else 0


def _refusal(reason: str) -> InvalidRequest:
    """Return the refusal of a format, with the reason in one line."""
    words = " ".join(reason.replace("<non-verbose/>", "").split())
    short = words if len(words) <= _REASON_CHARACTERS else words[:_REASON_CHARACTERS] + " ..."
    return InvalidRequest(f"response_format cannot be followed: {short}", field="response_format")
