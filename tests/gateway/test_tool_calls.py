"""Calls of tools are found in any cutting of an output, what is none stays text, and forced outputs are calls."""

import json
import tracemalloc
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from paceline.gateway import tool_calls
from paceline.gateway.bodies import Json
from paceline.gateway.tool_calls import CallFinder, ToolFormat, answer_or_calls, call_finder, forced_calls, place_after
from paceline.grammars import Grammars
from paceline.types import ResponseFormat
from tests.fakes.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/whole"}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"whole": {"type": "integer"}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NAMES = ("add", "now", "say")
TWO = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

SAYS = r"\"</tool_call>\n<tool_call>\\"
SAID = '"</tool_call>\n<tool_call>\\'
SAY = f'<tool_call>{{"name": "say", "arguments": {{"text": "{SAYS}"}}}}</tool_call>'


def found(finder: CallFinder, *texts: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls of an output that comes in parts."""
    parts = [*(finder.feed(text) for text in texts), finder.finish()]
    calls = [call for part in parts for call in part.calls]
    assert len({call.id for call in calls}) == len(calls)
    return "".join(part.text for part in parts), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        ("just text", "just text", []),
        (ONE, "", [("add", {"a": 1})]),
        (f"I add.\n{ONE}\n{TWO}\n", "I add.\n", [("add", {"a": 1}), ("now", {})]),
        (f"{ONE} done", " done", [("add", {"a": 1})]),
        (ONE.removesuffix("</tool_call>"), "", [("add", {"a": 1})]),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}', '<tool_call>{"name": "a", "arguments": {"x": NaN}}', []),
        (
            '<tool_call>{"name": "a", "arguments": {"x": 1e999}}',
            '<tool_call>{"name": "a", "arguments": {"x": 1e999}}',
            [],
        ),
        # Half of a character: clients could not send it back.
        (
            r'<tool_call>{"name": "a", "arguments": {"x": "\ud83d"}}',
            r'<tool_call>{"name": "a", "arguments": {"x": "\ud83d"}}',
            [],
        ),
        (
            r'<tool_call>{"name": "a", "arguments": {"x": "\ud83d\ude00"}}',
            "",
            [("a", {"x": "\N{GRINNING FACE}"})],
        ),
        ("<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
        ("a < b <tool", "a < b <tool", []),
        # What is no call hides none behind it, though its strings have no end.
        (f'<tool_call>{{"5"" tall"}}\n</tool_call>\n{TWO}', '<tool_call>{"5"" tall"}\n</tool_call>\n', [("now", {})]),
        (f'<tool_call>{{"a</tool_call> {TWO}', '<tool_call>{"a</tool_call> ', [("now", {})]),
        (f'<tool_call>"</tool_call>{TWO}<tool_call>"</tool_call>',)
        + ('<tool_call>"</tool_call><tool_call>"</tool_call>', [("now", {})]),
        (f"<tool_call>\n{ONE}", "<tool_call>\n", [("add", {"a": 1})]),
        (f"{ONE}\n<tool_call>{{broken</tool_call>", "\n<tool_call>{broken</tool_call>", [("add", {"a": 1})]),
    ],
)
def test_hermes_calls_are_parted_from_text(output: str, text: str, calls: list[Any]) -> None:
    assert found(call_finder("hermes", NAMES), output) == (text, calls)


@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        ("just text", "just text", []),
        ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        (' <|python_tag|>{"name": "now", "parameters": {}}; {"name": "now"}', "", [("now", {}), ("now", {})]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ('{"name": "Ann", "age": 30}', '{"name": "Ann", "age": 30}', []),
        ('{"name": "now"}; {"name": "Ann"}', '{"name": "now"}; {"name": "Ann"}', []),
        ('{"name": "add", "parameters": {"a": 1}', '{"name": "add", "parameters": {"a": 1}', []),
        ('{"name": "now"} and text', '{"name": "now"} and text', []),
        ("<|pyt", "<|pyt", []),
        ("", "", []),
    ],
)
def test_calls_of_llama_are_whole_outputs(output: str, text: str, calls: list[Any]) -> None:
    assert found(call_finder("llama3-json", NAMES), output) == (text, calls)


@given(
    st.sampled_from(get_args(ToolFormat)),
    st.lists(
        st.sampled_from(
            [ONE, TWO, SAY, " ", "\n", "text", "<", "<tool_call>", "</tool_call>", '{"name": "now"}', ";", '"', "\\"]
        )
    ),
    st.data(),
)
def test_how_an_output_is_cut_changes_nothing(form: ToolFormat, parts: list[str], data: st.DataObject) -> None:
    output = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=6)))
    texts = [output[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    text, calls = found(call_finder(form, NAMES), output)
    assert found(call_finder(form, NAMES), *texts) == (text, calls)
    assert calls or text == output


def test_a_tag_in_an_argument_is_part_of_it_wherever_the_output_is_cut() -> None:
    """The call ended there, and was text."""
    outputs = [(SAY, ""), (f"So: {SAY}\n{SAY}", "So: "), (SAY.removesuffix("</tool_call>"), "")]
    for output, text in outputs:
        calls = [("say", {"text": SAID})] * output.count("say")
        for cut in range(len(output)):
            assert found(call_finder("hermes", NAMES), output[:cut], output[cut:]) == (text, calls)
        assert found(call_finder("hermes", NAMES), *output) == (text, calls)


def memory_of(finder: CallFinder, begin: str, token: str, count: int) -> int:
    """Return the bytes that feeding a finder takes, those of each token counted anew."""
    taken = 0
    finder.feed(begin)
    tracemalloc.start()
    try:
        for _ in range(count):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            finder.feed(token)
            taken += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return taken


@pytest.mark.parametrize(
    ("form", "begin", "token"),
    [
        ("hermes", '<tool_call>{"name": "say", "arguments": {"text": "', "word "),
        ("hermes", "<tool_call>{broken", " word"),
        ("hermes", '<tool_call>{"broken</tool_call>', '<tool_call>"</tool_call>"'),
        ("hermes", ONE, "\n"),
        ("llama3-json", '{"name": "say", "parameters": {"text": "', "word "),
        ("llama3-json", "", "\n"),
        ("llama3-json", "<|python_tag|>", " "),
    ],
)
def test_what_a_finder_holds_back_is_not_copied_for_every_token(form: ToolFormat, begin: str, token: str) -> None:
    """An argument of 100,000 tokens took 18 seconds, in which all streams waited."""
    some, more = (memory_of(call_finder(form, NAMES), begin, token, count) for count in (1000, 4000))
    assert more < 8 * some


def test_what_is_read_again_is_read_a_second_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tag that stands behind a string without an end makes a new reading of all that follows."""
    looked_at = 0

    def counted(place: Any, text: str) -> Any:
        nonlocal looked_at
        looked_at += len(text)
        return place_after(place, text)

    monkeypatch.setattr(tool_calls, "place_after", counted)
    for part in ('<tool_call>"</tool_call>', '<tool_call>"</tool_call>"', '<tool_call>"', r"<tool_call>\"</tool_call>"):
        output = part * 1000
        for texts in ([output], list(output)):
            looked_at = 0
            assert found(call_finder("hermes", NAMES), *texts) == (output, [])
            assert looked_at <= 2 * len(output), part


def test_white_space_amid_text_behind_a_call_is_kept_however_it_comes() -> None:
    """A line's end that came by itself was taken for what stands between calls."""
    finder = call_finder("hermes", NAMES)
    assert found(finder, ONE, "\n", "First", "\n\n", "second", " ", TWO, "\n") == (
        "\nFirst\n\nsecond ",
        [("add", {"a": 1}), ("now", {})],
    )


def test_text_before_a_call_comes_as_soon_as_it_can_be_no_tag() -> None:
    finder = call_finder("hermes", NAMES)
    assert [finder.feed(text).text for text in ("a <", "b", " <tool_", "x")] == ["a ", "<b", " ", "<tool_x"]


def allows(form: ResponseFormat, text: str) -> bool:
    """Return whether a format allows a whole output."""
    tokens = LLTokenizer("byte")
    grammar = form.grammar or LLMatcher.grammar_from_json_schema(form.json_schema)
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar) if form.grammar else grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_forced_hermes_calls_follow_their_tools() -> None:
    form, single = (forced_calls("hermes", [ADD, NOW], several=several) for several in (True, False))
    assert allows(form, ONE) and allows(single, ONE)
    assert allows(form, f"{ONE}\n{ONE}") and not allows(single, f"{ONE}\n{ONE}")
    assert not allows(form, "text") and not allows(form, ONE.replace("1", '"one"'))
    assert not allows(form, ONE.replace("add", "sub"))
    assert found(call_finder("hermes", NAMES), f"{ONE}\n{ONE}")[1] == [("add", {"a": 1})] * 2


@pytest.mark.parametrize("form", get_args(ToolFormat))
def test_a_forced_call_whose_argument_holds_a_tag_is_a_call(form: ToolFormat) -> None:
    """It was text, though a forced output is nothing but calls."""
    said = {"type": "object", "properties": {"text": {"const": SAID}}, "required": ["text"]}
    tool = {"type": "function", "function": {"name": "say", "parameters": {**said, "additionalProperties": False}}}
    call = SAY.removeprefix("<tool_call>").removesuffix("</tool_call>")
    output = f"<tool_call>\n{call}\n</tool_call>" if form == "hermes" else call.replace("arguments", "parameters")
    assert allows(forced_calls(form, [tool], several=False), output)
    assert found(call_finder(form, ["say"]), *output) == ("", [("say", {"text": SAID})])


def test_forced_calls_of_llama_follow_their_tools() -> None:
    form = forced_calls("llama3-json", [NOW, ADD], several=False)
    assert allows(form, '{"name": "add", "parameters": {"a": 1}}')
    assert not allows(form, '{"name": "add", "parameters": {"a": true}}')
    assert not allows(form, "text")


@pytest.mark.parametrize("form", get_args(ToolFormat))
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "integer"}}},
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}},
        {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "integer"}]},
        {"$id": "https://example.com/add.json", "properties": {"a": {"$ref": "#/$defs/whole"}}}
        | {"$defs": {"whole": {"type": "integer"}}},
        {"properties": {"a": {"type": "integer", "description": "as \\%json"}}},
    ],
    ids=["no type", "null", "any of", "id", "words of the grammar"],
)
def test_forced_arguments_are_an_object_whatever_the_schema_says(form: ToolFormat, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    forced = forced_calls(form, [tool], several=False)
    GRAMMARS.check(forced)
    key = "arguments" if form == "hermes" else "parameters"
    for arguments, is_call in (('{"a": 1}', True), ('{"a": "x"}', False), ("null", False), ("5", False)):
        call = f'{{"name": "add", "{key}": {arguments}}}'
        output = f"<tool_call>\n{call}\n</tool_call>" if form == "hermes" else call
        progress, ids = GRAMMARS.begin(forced), TOKENIZER.encode(output, add_special_tokens=False).ids
        assert (progress.move(ids) and progress.is_whole) is is_call, arguments


LIKE_A_REFERENCE = {"$ref": "#/a"}


@pytest.mark.parametrize("form", get_args(ToolFormat))
@pytest.mark.parametrize(
    ("properties", "right", "wrong"),
    [
        ({"a": {"const": LIKE_A_REFERENCE}}, {"a": LIKE_A_REFERENCE}, {"a": {"$ref": "#"}}),
        ({"a": {"enum": [[LIKE_A_REFERENCE]]}}, {"a": [LIKE_A_REFERENCE]}, {"a": [{"$ref": "#"}]}),
        ({"const": {"$ref": "#/$defs/whole"}}, {"const": 1}, {"const": "x"}),
        ({"$ref": {"type": "integer"}}, {"$ref": 1}, {"$ref": "x"}),
        ({"a": {"$ref": "#/$defs/default"}}, {"a": 1}, {"a": "x"}),
        ({"a": {"$ref": "#named"}}, {"a": 1}, {"a": "x"}),
    ],
    ids=["const", "enum", "a property const", "a property $ref", "a definition default", "an anchor"],
)
def test_forced_arguments_refer_to_what_their_tool_does(
    form: ToolFormat, properties: Json, right: Json, wrong: Json
) -> None:
    """A value that looks like a reference was changed as one is, and only the changed one could be the argument."""
    whole = {"type": "integer", "$anchor": "named"}
    parameters = {"properties": properties, "required": [*properties], "additionalProperties": False}
    parameters["$defs"] = {"whole": {"type": "integer"}, "default": {"$ref": "#/$defs/whole"}, "named": whole}
    tools = [NOW, {"type": "function", "function": {"name": "add", "parameters": parameters}}]
    forced = forced_calls(form, tools, several=False)
    GRAMMARS.check(forced)
    key = "arguments" if form == "hermes" else "parameters"
    for arguments in (right, wrong):
        call = f'{{"name": "add", "{key}": {json.dumps(arguments)}}}'
        assert allows(forced, f"<tool_call>\n{call}\n</tool_call>" if form == "hermes" else call) is (
            arguments is right
        )


@pytest.mark.parametrize("form", get_args(ToolFormat))
@pytest.mark.parametrize("function", [{"name": "add"}, {"name": "add", "parameters": None}])
def test_a_tool_that_names_no_parameters_takes_no_arguments(form: ToolFormat, function: Json) -> None:
    """It could be called with any, and a model that is forced to call it writes some without an end."""
    forced = forced_calls(form, [{"type": "function", "function": function}], several=False)
    key = "arguments" if form == "hermes" else "parameters"
    for arguments, is_call in (("{}", True), ('{"a": 1}', False)):
        call = f'{{"name": "add", "{key}": {arguments}}}'
        assert allows(forced, f"<tool_call>\n{call}\n</tool_call>" if form == "hermes" else call) is is_call


@pytest.mark.parametrize("form", get_args(ToolFormat))
def test_an_output_with_a_format_and_tools_is_an_answer_or_calls_and_no_mixture(form: ToolFormat) -> None:
    """It was an answer whatever the model would do: who asked for a format had no tool called."""
    answer: Json = {"type": "object", "properties": {"sum": {"$ref": "#/$defs/whole", "description": "as %json"}}}
    answer |= {"required": ["sum"], "additionalProperties": False, "$defs": {"whole": {"type": "integer"}}}
    asked, single = (answer_or_calls(form, NAMES, json.dumps(answer), several=several) for several in (True, False))
    GRAMMARS.check(asked)
    call = '{"name": "add", "parameters": {"a": ["any"]}}'
    if form == "hermes":
        call = f"<tool_call>\n{call.replace('parameters', 'arguments')}\n</tool_call>"
        assert allows(asked, f"{call}\n{call}") and not allows(single, f"{call}\n{call}")
    for one in (asked, single):
        assert allows(one, '{"sum": 3}') and allows(one, call)
        for other in ('{"sum": "3"}', call.replace("add", "sub"), f'{call}{{"sum": 3}}', f'{{"sum": 3}}{call}', "text"):
            assert not allows(one, other)
    assert found(call_finder(form, NAMES), call) == ("", [("add", {"a": ["any"]})])
    assert found(call_finder(form, NAMES), '{"sum": 3}') == ('{"sum": 3}', [])
