"""What a grammar allows depends on the output alone, and no format can do harm."""

import json
import random
import threading
from collections.abc import Sequence
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders

from paceline.errors import InvalidRequest
from paceline.grammars import MAX_FORMAT_CHARACTERS, STACK_BYTES, Grammars, Progress
from paceline.types import ResponseFormat
from tests.fakes.formats import follows, random_formats
from tests.fakes.tokenizers import DECODERS, byte_tokenizer, word_tokenizer

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER)
LIMITED = ResponseFormat(grammar='start: a "." b\na[max_tokens=3]: /[a-z]+/\nb: /[0-9]*/')
NESTED = ResponseFormat(grammar='start: "(" start ")" | /[xy]{1,3}/')
SPACED = ResponseFormat(json_schema='{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}')
"""White space between its parts is free."""
COMPLEMENT = ResponseFormat(grammar="start: other\nother: ~/[0-9]+x/")
"""Of bytes, of which some stand for special tokens in the library's masks."""


def bytes_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def allowed_ids(progress: Progress) -> set[int]:
    bits = progress.allowed()
    return {8 * index + bit for index, one in enumerate(bits) for bit in range(8) if one >> bit & 1}


def written(form: ResponseFormat, rng: random.Random, most: int = 40) -> list[int]:
    """Return a random output of a format, perhaps cut."""
    progress, output = GRAMMARS.begin(form), list[int]()
    while len(output) < most and (ids := sorted(allowed_ids(progress))):
        output.append(rng.choice(ids))
        assert progress.move(output)
        if progress.is_whole and rng.random() < 0.3:
            break
    return output


@pytest.mark.parametrize(
    ("regex", "words"),
    [("(ab|ac)d?", ["ab", "ac", "abd", "acd"]), ("é?x{0,2}", ["", "x", "xx", "é", "éx", "éxx"]), ("(a|b){2}", [])],
)
def test_a_token_is_allowed_exactly_where_a_word_of_the_language_goes_on_with_it(regex: str, words: list[str]) -> None:
    """The language is written out, so nothing of the library's is compared with itself."""
    language = [bytes_of(one) for one in words or [one + other for one in "ab" for other in "ab"]]
    prefixes = {tuple(word[:length]) for word in language for length in range(len(word) + 1)}
    progress = GRAMMARS.begin(ResponseFormat(regex=regex))
    for prefix in sorted(prefixes, key=lambda one: random.random()):
        assert progress.move(prefix)
        longer = {
            word[len(prefix)] for word in language if len(word) > len(prefix) and word[: len(prefix)] == [*prefix]
        }
        assert allowed_ids(progress) == longer
        assert progress.is_whole is ([*prefix] in language)


@pytest.mark.parametrize("form", [*random_formats(3), LIMITED, NESTED, COMPLEMENT], ids=str)
def test_a_token_is_allowed_exactly_where_a_fresh_reader_takes_it(form: ResponseFormat) -> None:
    output = written(form, random.Random(3))
    progress = GRAMMARS.begin(form)
    for length in range(0, len(output), 4):
        assert progress.move(output[:length])
        taken = {one for one in range(300) if GRAMMARS.begin(form).move([*output[:length], one])}
        assert allowed_ids(progress) == taken


@pytest.mark.parametrize("form", [*random_formats(8, seed=2), LIMITED, NESTED, SPACED], ids=str)
def test_what_is_allowed_does_not_depend_on_what_was_asked_before(form: ResponseFormat) -> None:
    rng = random.Random(4)
    outputs = [written(form, rng) for _ in range(3)]
    prefixes = [output[:length] for output in outputs for length in range(len(output) + 1)]
    fresh = {tuple(one): asked(GRAMMARS.begin(form), one) for one in prefixes}
    progress = GRAMMARS.begin(form)
    for one in rng.choices(prefixes, k=80):
        if rng.random() < 0.3:
            broken = [*one, rng.randrange(320), 256, 257]
            assert asked(progress, broken) == asked(GRAMMARS.begin(form), broken)
        assert asked(progress, one) == fresh[tuple(one)]


@pytest.mark.parametrize(("before", "now"), [('{"a": ', '{ "a" '), ('{ "a" ', '{"a": '), ('{ "a": ', '{"a":null ')])
def test_behind_drafts_that_were_wrong_the_mask_is_that_of_the_output_that_went_on(before: str, now: str) -> None:
    """Both end in white space behind as many parts: the mask was the drafts' own, and outputs broke their format."""
    progress = GRAMMARS.begin(SPACED)
    asked(progress, bytes_of(before))
    assert asked(progress, bytes_of(now)) == asked(GRAMMARS.begin(SPACED), bytes_of(now))


WEARING = ResponseFormat(regex="(a?){200}a{200}")
"""One mask comes to the library's limits, which all copies of a matcher share."""


def test_what_was_asked_before_refuses_no_right_token_where_it_came_to_the_limits() -> None:
    """Every token was refused in silence: the output ended with an error, or went on without a mask behind a draft."""
    progress, a = GRAMMARS.begin(WEARING), bytes_of("a")
    for count in (0, 1, 5, 2):
        assert asked(progress, a * count) == asked(GRAMMARS.begin(WEARING), a * count)
        assert progress.move(a * count) and allowed_ids(progress) == {*a}
        assert not progress.move([*a * count, *bytes_of("b")]) and not progress.error


def test_a_text_that_the_tokenizers_normalizer_changes_is_written_as_it_stands() -> None:
    """Where nothing else could follow, only a token of the normalized text was allowed, after which nothing could."""
    changed = json.loads(TOKENIZER.to_str()) | {"added_tokens": [], "normalizer": {"type": "NFC"}}
    changed["model"]["vocab"]["eÌ"], changed["model"]["merges"] = 256, [["e", "Ì"]]  # bytes 65 and CC
    tokenizer = Tokenizer.from_str(json.dumps(changed))
    progress, output = Grammars(tokenizer).begin(ResponseFormat(regex="(a|b)e\u0301c")), bytes_of("a")
    while not progress.is_whole:
        assert progress.move(output)
        output += allowed_ids(progress)
    assert output == [*bytes_of("a"), 256, *bytes_of("\u0301c")[1:]]
    assert tokenizer.decode(output) == "ae\u0301c"


def asked(progress: Progress, output: Sequence[int]) -> tuple[bool, bytes, bool]:
    return progress.move(output), bytes(progress.allowed()), progress.is_whole


@pytest.mark.parametrize("form", random_formats(20, seed=5), ids=str)
def test_what_is_whole_follows_its_format(form: ResponseFormat) -> None:
    rng, found = random.Random(6), 0
    for _ in range(5):
        output = written(form, rng, most=200)
        progress = GRAMMARS.begin(form)
        for length in range(len(output) + 1):
            assert progress.move(output[:length])
            if progress.is_whole:
                found += 1
                assert follows(TOKENIZER.decode(output[:length]), form)
    assert found


DIVIDED = '{"type": "integer", "multipleOf": 999983}'
DIVIDED_LESS = '{"type": "integer", "multipleOf": 9001}'


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (ResponseFormat(), "0 of json_schema, regex and grammar are set"),
        (ResponseFormat(regex="a", grammar="start: /b/"), "2 of json_schema, regex and grammar are set"),
        (ResponseFormat(regex="a" * (MAX_FORMAT_CHARACTERS + 1)), "it has 65537 characters; give 65536 at most"),
        (ResponseFormat(regex="["), "unclosed character class"),
        (ResponseFormat(regex=r"(?=a)b"), "look-ahead"),
        (ResponseFormat(regex=r"[^\s\S]"), "no text satisfies it"),
        (ResponseFormat(grammar="start: a\na: a"), "no text satisfies it"),
        (ResponseFormat(grammar='start: "a" b'), "unknown name"),
        (ResponseFormat(grammar="start: %json {"), "Expecting"),
        (ResponseFormat(grammar='start: %json {"type": "strin"}'), "Invalid type: strin"),
        (ResponseFormat(grammar="start: a a\na: %json " + DIVIDED), "multipleOf come to 999983"),
        (ResponseFormat(grammar=f"start: %json {DIVIDED_LESS} | %json {DIVIDED_LESS}"), "multipleOf come to 18002"),
        (ResponseFormat(grammar="start: %json " + '{"a": ' * 9000 + "1" + "}" * 9000), "deep|recursion"),
        (ResponseFormat(json_schema="{"), "Expecting"),
        (ResponseFormat(json_schema='{"type": "object"}}, {"lark_grammar": "start: /x/"'), "Extra data"),
        (ResponseFormat(json_schema="[1]"), "must be an object or boolean"),
        (ResponseFormat(json_schema='{"type": "strin"}'), "Invalid type: strin"),
        (ResponseFormat(json_schema='{"uniqueItems": true}'), "Unimplemented keys"),
        (ResponseFormat(json_schema='{"enum": []}'), "Unsatisfiable schema"),
        (ResponseFormat(json_schema='{"$ref": "http://127.0.0.1/schema"}'), "does not fetch resources"),
        (ResponseFormat(json_schema='{"a": ' * 9000 + "1" + "}" * 9000), "deep|recursion"),
        (ResponseFormat(json_schema=DIVIDED), "multipleOf come to 999983"),
    ],
)
def test_a_format_that_cannot_be_followed_is_refused_in_one_short_line(form: ResponseFormat, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refusal:
        GRAMMARS.check(form)
    assert refusal.value.field == "response_format"
    assert "\n" not in refusal.value.message
    assert len(refusal.value.message) < 300


def test_rules_that_name_each_other_in_a_long_row_end_no_process() -> None:
    """Reading them takes a deep stack; on an ordinary one the process dies."""
    names = [f"r{number}" for number in range(4000)]
    rules = "\n".join(f"{one}: {other}" for one, other in pairwise(names))
    GRAMMARS.check(ResponseFormat(grammar=f'start: r0\n{rules}\n{names[-1]}: "x"'))
    kinds = {one: {"type": "array", "items": {"$ref": f"#/$defs/{other}"}} for one, other in pairwise(names[:1000])}
    schema = {"$ref": "#/$defs/r0", "$defs": {**kinds, names[999]: {"type": "null"}}}
    GRAMMARS.check(ResponseFormat(json_schema=json.dumps(schema)))


def test_a_format_that_is_compiled_beside_another_has_a_deep_stack_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a new thread's stack is the process's: the first to have begun its thread would put it back."""
    usual, begin, sizes = threading.stack_size(), threading.Thread.start, list[int]()
    is_second, is_first_done = threading.Event(), threading.Event()

    def start(thread: threading.Thread) -> None:
        if threading.current_thread() is second:
            is_second.set()
            is_first_done.wait()
        else:
            begin(second)
            is_second.wait(0.1)  # it does not come while the first holds it off
        sizes.append(threading.stack_size())
        begin(thread)

    second = threading.Thread(target=lambda: GRAMMARS._compile(ResponseFormat(regex="b+")))
    monkeypatch.setattr(threading.Thread, "start", start)
    GRAMMARS._compile(ResponseFormat(regex="a+"))
    is_first_done.set()
    second.join()
    assert sizes == [STACK_BYTES, STACK_BYTES]
    assert threading.stack_size() == usual


def test_where_a_grammar_becomes_too_complex_nothing_is_allowed() -> None:
    progress = GRAMMARS.begin(ResponseFormat(grammar="start: " + "x " * 10000 + "\nx: /.*/"))
    assert any(progress.allowed())
    assert not progress.move(bytes_of("a"))
    assert not any(progress.allowed())
    assert not progress.is_whole
    assert "Current row has" in progress.error
    assert progress.move([])
    assert any(progress.allowed())


def garbled(rng: random.Random) -> ResponseFormat:
    """Return a format of random pieces; few of them mean something."""
    pieces = [
        '"a"',
        "/b*/",
        "start",
        ":",
        "|",
        "(",
        ")",
        "?",
        "x",
        "\n",
        "~",
        "{2,900}",
        "[",
        "]",
        "{",
        "}",
        "\\",
        ".*",
    ]
    pieces += ["%ignore", "&", '"type"', '"object"', "$", "^", "\\d", "é", "\0", "<[5]>", "lazy", ",", "1e9", "+", "-"]
    text = "".join(rng.choices(pieces, k=rng.randrange(1, 40)))
    kind = rng.randrange(3)
    if kind == 0:
        return ResponseFormat(json_schema='{"type": "object", "properties": {' + text + "}}")
    return ResponseFormat(regex=text) if kind == 1 else ResponseFormat(grammar=f"start: x\nx: {text}")


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_random_formats_are_refused_or_followed(count: int) -> None:
    rng, followed = random.Random(7), 0
    for _ in range(count):
        form = garbled(rng)
        try:
            GRAMMARS.check(form)
        except InvalidRequest as error:
            assert error.field == "response_format"
        else:
            followed += 1
            written(form, rng, most=5)
    assert 0 < followed < count


def test_special_tokens_and_ids_without_text_are_never_allowed() -> None:
    everything = GRAMMARS.begin(ResponseFormat(regex=r"(?s:.*)"))
    assert max(allowed_ids(everything)) < 256
    for wrong in (256, 257, 100_000):
        assert not everything.move([wrong])


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused() -> None:
    grammars = Grammars(word_tokenizer(decoders.WordPiece()))
    with pytest.raises(InvalidRequest, match="the model's tokenizer cannot be followed"):
        grammars.check(ResponseFormat(regex="a"))


def test_a_tokenizer_over_which_the_library_panics_is_refused() -> None:
    """It has a token `<0xZZ>`. No service of such a model started."""
    grammars = Grammars(word_tokenizer(DECODERS["llama"]))
    with pytest.raises(InvalidRequest, match="the model's tokenizer cannot be followed: the library fails over it"):
        grammars.check(ResponseFormat(regex="a"))
