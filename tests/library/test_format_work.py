"""What a format costs is counted before it is compiled, so none takes long, and every service refuses the same ones.

Without the bounds the first formats here took hours and gigabytes: an `allOf` of 22 patterns took 16 s, and each more
twice as long; a grammar of 7 regexes took 22 s and 800 MiB of the target's pass; doubled references never ended.
"""

import json
from contextlib import suppress
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.format_work.grammars import check_grammar
from paceline.format_work.regexes import MAX_MEETING, TooMuchWork, regex_size
from paceline.format_work.schemas import MAX_PARTS, SchemaWork
from paceline.grammars import Grammars
from paceline.types import ResponseFormat
from tests.fakes.tokenizers import byte_tokenizer

GRAMMARS = Grammars(byte_tokenizer())
Schema = dict[str, Any]


def pattern(number: int) -> Schema:
    return {"type": "string", "pattern": f"a.{{0,40}}b{number}"}


def meeting(count: int) -> Schema:
    return {"allOf": [pattern(number) for number in range(count)]}


def doubled(depth: int, last: Schema) -> Schema:
    """Return a schema whose references name the next twice."""
    names = {f"d{one}": {"allOf": [{"$ref": f"#/$defs/d{one + 1}"}] * 2} for one in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{depth}": last}}


def conjoined(count: int, regex: str = r"/(.|\n)*a.{{0,40}}b{}(.|\n)*/") -> str:
    return " & ".join(regex.format(number) for number in range(count))


def check_schema(*schemas: Any) -> None:
    work = SchemaWork()
    for one in schemas:
        work.add(one)


@pytest.mark.parametrize(
    "schema",
    [
        meeting(30),
        {"type": "object", "properties": {"a": meeting(30)}},
        {"type": "array", "items": meeting(30)},
        {"type": "array", "prefixItems": [meeting(30)]},
        {"allOf": [{"properties": {"a": pattern(number)}} for number in range(30)]},
        {"allOf": [{"additionalProperties": pattern(number)} for number in range(30)], "properties": {"a": True}},
        {"allOf": [{"items": pattern(number)} for number in range(30)]},
        {"allOf": [{"anyOf": [pattern(number), {"type": "null"}]} for number in range(5)]},
        {"allOf": [meeting(15), {"allOf": [pattern(40), meeting(2)]}]},
        {**pattern(1), "allOf": [pattern(2), {"$ref": "#/$defs/a"}], "$defs": {"a": pattern(3)}},
        {**pattern(1), "format": "uri", "$ref": "#/$defs/a", "$defs": {"a": pattern(3)}},
        {"patternProperties": {"a.{0,200}b": True, "b.{0,200}a": True}},
        {**pattern(0), "pattern": "a.{0,400}b", "enum": ["word"] * 5000},
        {"anyOf": [{"allOf": [pattern(2 * one), pattern(2 * one + 1)]} for one in range(30)]},
        {"$ref": "#/$defs/", "$defs": {"": meeting(30)}},
        {"$ref": "#/%24defs%2Fa", "$defs": {"a": meeting(30)}},
        {"$ref": "#/$defs/a/anyOf/+1", "$defs": {"a": {"anyOf": [{}, meeting(30)]}}},
    ],
    ids=lambda schema: str(schema)[:80],
)
def test_patterns_that_are_too_large_together_are_refused(schema: Schema) -> None:
    with pytest.raises(InvalidRequest, match=f"one text come to over {MAX_MEETING}"):
        GRAMMARS.check(ResponseFormat(json_schema=json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        doubled(40, {"type": "string"}),
        doubled(40, pattern(1)),
        {"type": "array", "items": doubled(40, {"type": "null"})["$defs"]["d0"], **doubled(40, {"type": "null"})},
        {"allOf": [{"anyOf": [{"type": "object"}] * 8}] * 12},
        {"allOf": [{"properties": {str(one): True for one in range(1000)}}, {"anyOf": [{"type": "object"}] * 1000}]},
        {"properties": {str(one): True for one in range(1000)}, "enum": [{}] * 1000},
        {"allOf": [1] * 6000 + [{"anyOf": [1] * 13000}]},
    ],
    ids=lambda schema: str(schema)[:80],
)
def test_a_schema_that_is_too_large_written_out_is_refused(schema: Schema) -> None:
    with pytest.raises(InvalidRequest, match=f"over {MAX_PARTS} parts"):
        GRAMMARS.check(ResponseFormat(json_schema=json.dumps(schema)))


@pytest.mark.parametrize(
    "grammar",
    [
        f'start: A\nA: "z" | ("Q" ({conjoined(10)}))',
        f'start: "z" A\nA: B & /a{{0,40}}b/\nB: C & D\nC: {conjoined(2)}\nD: {conjoined(2)}',
        f"start: A\n%ignore /x/ & {conjoined(4)}\nA: /a/",
        f"start: ~({conjoined(10)})",
        r"start: A" + "\n" + r"A: /(?x) ( a#(" + "\n" + r" ){400} b/ & /[ab]{400}c/",
        "start: A\nA: B{100}\nB: " + conjoined(2, "/[^{0}]*[ab{0}].{{40}}/"),
        "start: A\nA: B~3..100\nB: " + conjoined(2, "/[^{0}]*[ab{0}].{{40}}/"),
        "start: A\nA: /(ab{397})+c/ & /(ab{401})+d/",
        "start: %lark {\nstart: A\nA: " + conjoined(10) + "\n}",
        "start: A\nA: /x/ // no comment ends here\n | " + conjoined(10),
        'start: A\nA: "/" (' + conjoined(10) + ') "/"',
        r"start: A" + "\n" + r"A: /[^0]*[ab0](.{30})?{100}/ & /[^1]*[ab1](.{30})?{100}/",
        r"start: A" + "\n" + r"A: /[^0]*[ab0]\w{40}/ & /[^1]*[ab1]\p{L}{40}/",
        "start: A\nA: /(?x)[^0]*[ab0].{#\n400}/ & /(?x)[^1]*[ab1].{#\n400}/",
        'start: A\nA: %regex {"substring_chars": "' + "ab" * 400 + '"} & /(b{99}){9}/',
    ],
)
def test_terminals_whose_regexes_are_too_large_together_are_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match=f"one text come to over {MAX_MEETING}"):
        GRAMMARS.check(ResponseFormat(grammar=grammar))


def test_terminals_that_name_each_other_too_deep_are_refused_only_beside_operators() -> None:
    names = "\n".join(f"T{one}: T{one + 1}" for one in range(4000))
    GRAMMARS.check(ResponseFormat(grammar=f"start: T0\n{names}\nT4000: /a/"))
    with pytest.raises(InvalidRequest, match="name each other 101 deep"):
        GRAMMARS.check(ResponseFormat(grammar=f"start: T0\n{names}\nT4000: /a/ & /[ab]/"))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"f{one}": pattern(one) for one in range(60)}, "additionalProperties": False},
        {"properties": {f"f{one}": pattern(one) for one in range(60)}, "additionalProperties": pattern(60)},
        {"properties": {f"f{one}": {"allOf": [{"$ref": "#/$defs/a"}], "title": "A"} for one in range(60)}}
        | {"$defs": {"a": {"enum": [f"word {one}" for one in range(200)]}}},
        {"type": "string", "minLength": 8, "allOf": [{"pattern": one} for one in ("[A-Z]", "[a-z]", "[0-9]")]},
        {"type": "string", "pattern": "^https://", "format": "uri", "maxLength": 2083},
        {"type": "string", "pattern": "^[a-z0-9.]{1,64}@example[.]com$", "format": "email"},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"properties": {"a": {"$ref": "#"}}}}},
        {"$ref": "#/$defs/a"}
        | {
            "$defs": {
                "a": {"allOf": [{"$ref": "#/$defs/b"}, {"properties": {"c": {"items": {"$ref": "#/$defs/a"}}}}]},
                "b": {"properties": {"id": {"type": "string", "format": "uuid"}}},
            }
        },
        {"allOf": [{"properties": {f"{base}{one}": pattern(one) for one in range(40)}} for base in "abcdef"]},
        {"enum": [f"word {one}" for one in range(3000)]},
        {"properties": {"id": {"type": "string"}}, "default": {"id": "x"}, "allOf": [{"$ref": "#/$defs/a"}]}
        | {"$defs": {"a": {"properties": {"b": {"type": "null"}}}}},
        {"type": "object", "$ref": "#/$defs/a"}
        | {
            "$defs": {
                "a": {"anyOf": [{"properties": {"b": pattern(1)}}, {"$ref": "#/$defs/c"}]},
                "c": {"anyOf": [{}, {}]},
            }
        },
        {"properties": {f"url{one}": {"format": "uri", "pattern": f"^https://{one}.example.com/"} for one in range(9)}},
        {"$ref": "#/$defs/a", "minLength": 3, "default": {"$id": "x", "$ref": "y"}}
        | {"$defs": {"a": {"type": "string"}, "b": {"$anchor": "b"}}},
        {"oneOf": [{"const": f"word {one}"} for one in range(2000)]},
    ],
    ids=lambda schema: str(schema)[:80],
)
def test_schemas_of_use_are_far_from_the_bounds(schema: Schema) -> None:
    check_schema(*[schema] * 3)


def test_grammars_of_use_are_far_from_the_bounds() -> None:
    check_grammar('start: NAME "=" /[0-9]{1,9}/\nNAME: /[a-z_]{1,64}/ & ~/if|else|while|for|return/')
    words = "|".join(f"KEYWORD{one}" for one in range(90))
    check_grammar(f"start: NAME\nNAME: /[a-z_][a-z0-9_]{{0,62}}/ & ~/{words}/")
    check_grammar('start: "&" "~" /a&b~c/ // & ~\n' + "x: /(a{100}){100}/")


def test_formats_at_the_bound_are_followed() -> None:
    halves = [f"/[^{one}]*[ab{one}].{{138}}/" for one in range(2)]
    grammar = f"start: A\nA: {' & '.join(halves)}"
    sizes = [regex_size(one[1:-1]) for one in halves]
    assert 0.95 * MAX_MEETING < sizes[0] * sizes[1] < MAX_MEETING
    GRAMMARS.check(ResponseFormat(grammar=grammar))
    schema = {"properties": {f"p{one}": {"type": "null"} for one in range(1200)}}
    GRAMMARS.check(ResponseFormat(json_schema=json.dumps({"allOf": [schema, {"type": "object"}]})))


def test_work_of_the_schemas_of_a_grammar_adds_up() -> None:
    two = json.dumps({"allOf": [pattern(1), pattern(2)]})
    other = json.dumps({"allOf": [{"type": "string", "pattern": "a{128}"}, {"type": "string", "pattern": "[ab]{140}"}]})
    for one in (two, other):
        check_schema(json.loads(one))
    with pytest.raises(InvalidRequest, match=f"over {MAX_MEETING}"):
        GRAMMARS.check(ResponseFormat(grammar=f"start: %json {two} | %json {other}"))


def test_names_that_are_no_places_meet_nothing() -> None:
    """What `$anchor` and `$id` name is not looked up, so what would be written out is unknown."""
    named = {"$defs": {"a": {"$anchor": "x", "type": "string"}}}
    check_schema({"$ref": "#x", **named})
    for name in ("#x", "#/$defs/b", "#/$defs/a/", "#/" + "9" * 5000):
        with pytest.raises(TooMuchWork, match="is no place of this schema"):
            check_schema({"$ref": name, "pattern": "a", **named})
    with pytest.raises(TooMuchWork, match=f"over {MAX_MEETING}"):
        check_schema({"$ref": "#x", "$defs": {"a": {"$anchor": "x", **meeting(30)}}})


def test_a_property_may_be_called_as_a_keyword_is() -> None:
    """What stood in properties called `default` or `enum` was taken for values, in which nothing is a schema."""
    anchored = {"$defs": {"a": {"$anchor": "x", **meeting(30)}}}
    with pytest.raises(TooMuchWork, match=f"over {MAX_MEETING}"):
        check_schema({"properties": {"default": {"$ref": "#x"}}, **anchored})
    own = {"$id": "http://x/", "$ref": "#/$defs/a", "pattern": "a", "$defs": {"a": meeting(30)}}
    with pytest.raises(TooMuchWork, match="is no place of this schema"):
        check_schema({"properties": {"enum": own}, "$defs": {"a": True}})
    with pytest.raises(TooMuchWork, match="is no place of this schema"):
        check_schema({"$ref": "#/default", "default": own})
    check_schema({"$ref": "#/properties/default", "properties": {"default": {"type": "string"}}})


def test_values_that_are_nested_deeply_are_refused_or_compiled() -> None:
    """Between the deepest that is read and the deepest that is written an error of Python's own came."""
    for depth in range(900, 1000):
        value = f'{{"default":{"[" * depth}{"]" * depth}}}'
        for form in (ResponseFormat(json_schema=value), ResponseFormat(grammar=f"start: %json {value}")):
            with suppress(InvalidRequest):
                GRAMMARS.check(form)


@pytest.mark.parametrize(
    ("regex", "size"),
    [
        ("a.c", 3),
        ("a.{0,40}b", 42),
        ("(a.|c){3}", 9),
        ("((a{3}){4}b){5}", 65),
        (r"[^]{9}]{2}\[{3}", 5),
        ("a{2,}", 2),
        ("(?:ab{3}){4}", 16),
        ("((.{25})?{25})?{25}", 25**3),
        (r"\w{3}[a\d]", 40),
        ("(?x)a{#\n400}", 10 * 12 * 400),
        ("select|from|where|group by", 1),
    ],
)
def test_the_size_of_a_regex_is_that_with_its_counts_written_out(regex: str, size: int) -> None:
    assert regex_size(regex) == size


@pytest.mark.parametrize("regex", [")" * 50 + "(" * 50, "[" * 50, "{9", "\\", "a{99999999999999999999}", "(?x"])
def test_what_is_no_regex_has_a_size_too(regex: str) -> None:
    assert regex_size(regex) >= 1


def test_counting_reads_a_text_once() -> None:
    """Both took minutes, where a part without an end was tried from each of its characters again."""
    assert regex_size("{" + " " * 65000) >= 1
    check_grammar("start: A & ~\nA: " + '"a\\' * 20000)
    assert regex_size("a{0000000000400}") == 400
