"""The output of `paceline generate` for a given answer."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from typer.testing import CliRunner

from paceline.cli import generate
from paceline.cli.app import app
from paceline.client import Client, Completion
from paceline.errors import InvalidRequest
from paceline.types import (
    Chat,
    ChatMessage,
    ClusterDescription,
    DraftingOptions,
    DraftSource,
    GenerationRequest,
    OutputPiece,
    ResponseFormat,
    Text,
    TokenIds,
    ToolCall,
)
from tests.commands import python_code
from tests.coordinators import fake_cluster
from tests.fakes.model_services import FakeDrafter, FakeVerifier, continuation

PROMPT = (5, 6, 7)
pytestmark = pytest.mark.review


@pytest.fixture(autouse=True)
def _silent_coordinator() -> Iterator[None]:
    """Keep the coordinator's log, which in use is in another process, out of the command's output."""
    with capture_logs():
        yield


class NotingClient:
    """A client that notes what is asked. The fake models have no tokenizer, so a predicted text goes no further."""

    def __init__(self, client: Client, asked: list[GenerationRequest]) -> None:
        self._client, self._asked = client, asked

    def _noted(self, request: GenerationRequest) -> GenerationRequest:
        self._asked.append(request)
        return replace(request, predicted_output=None)

    def generate(self, request: GenerationRequest, **limits: Any) -> AsyncIterator[OutputPiece]:
        return self._client.generate(self._noted(request), **limits)

    async def complete(self, request: GenerationRequest, **limits: Any) -> Completion:
        return await self._client.complete(self._noted(request), **limits)


@pytest.fixture
def asked() -> list[GenerationRequest]:
    """The requests that the command sent."""
    return []


@pytest.fixture(autouse=True)
def _fake_models(monkeypatch: pytest.MonkeyPatch, asked: list[GenerationRequest]) -> None:
    @asynccontextmanager
    async def connected(*_: Any, **__: Any) -> AsyncIterator[tuple[NotingClient, ClusterDescription]]:
        async with fake_cluster(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry()) as client:
            yield NotingClient(client, asked), await client.describe()

    monkeypatch.setattr(generate, "connected", connected)
    # The fake models have no tokenizer.
    monkeypatch.setattr(generate, "as_prompt", lambda *_: TokenIds(PROMPT))


def test_json_is_one_object_with_tokens_finish_and_seed() -> None:
    """review G11"""
    result = CliRunner().invoke(app, ["generate", "hello", "--json", "--max-new-tokens", "6", "--seed", "3"])
    assert result.exit_code == 0, result.exception
    answer = json.loads(result.stdout)
    assert answer["token_ids"] == continuation(PROMPT, 6)
    assert answer["seed"] == 3
    assert answer["usage"]["output_count"] == len(answer["token_ids"])


def test_the_summary_tells_the_speed() -> None:
    """review G11"""
    result = CliRunner().invoke(app, ["generate", "hello", "--max-new-tokens", "6"])
    assert "tokens/s)" in result.stderr


def test_json_tells_draft_tokens_by_source() -> None:
    result = CliRunner().invoke(app, ["generate", "hello", "--json", "--max-new-tokens", "6"])
    usage = json.loads(result.stdout)["usage"]
    (source,) = usage["sources"]
    assert (source["source"], source["model"]) == ("draft", "draft")
    assert (source["drafted_count"], source["accepted_count"]) == (usage["drafted_count"], usage["accepted_count"])


def test_the_request_says_what_the_flags_say_of_drafts(asked: list[GenerationRequest], tmp_path: Path) -> None:
    file = tmp_path / "expected.txt"
    file.write_bytes("hello\r\nwörld\n".encode())
    flags = ["--draft-sources", "suffix,draft", "--in-order", "--forbid-sources", "prediction"]
    named = ["--only-draft-model", "small", "--prediction", str(file)]
    result = CliRunner().invoke(app, ["generate", "hello", "--max-new-tokens", "6", *flags, *named])
    assert result.exit_code == 0, result.exception
    (request,) = asked
    suffix, draft, prediction = DraftSource.SUFFIX, DraftSource.DRAFT, DraftSource.PREDICTION
    assert request.drafting == DraftingOptions((suffix, draft), True, (prediction,), "small")
    assert request.predicted_output == Text("hello\r\nwörld\n")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--draft-sources", "heads,draft"], "has no heads, so drafts come from draft: the output is the same"),
        (["--draft-sources", "heads"], "has no heads, so nothing drafts for this: the output is the same"),
        (["--draft-sources", "suffix,prediction,draft"], None),
        ([], None),
    ],
    ids=["some left", "none left", "all there", "none named"],
)
def test_a_source_that_the_coordinator_lacks_is_told(flags: list[str], told: str | None) -> None:
    result = CliRunner().invoke(app, ["generate", "hello", "--max-new-tokens", "6", *flags])
    assert result.exit_code == 0, result.exception
    assert told in result.stderr if told else "the coordinator has no" not in result.stderr


@pytest.mark.parametrize(
    ("flag", "text", "form"),
    [
        ("--json-schema", ' {"type": "null"}', ResponseFormat(json_schema=' {"type": "null"}')),
        ("--json-schema", None, ResponseFormat(json_schema="é\n")),
        ("--regex", "a|b", ResponseFormat(regex="a|b")),
        ("--grammar", None, ResponseFormat(grammar="é\n")),
    ],
)
def test_the_request_has_the_format_of_the_flag_or_its_file(
    flag: str, text: str | None, form: ResponseFormat, asked: list[GenerationRequest], tmp_path: Path
) -> None:
    file = tmp_path / "format"
    file.write_text("é\n")
    result = CliRunner().invoke(app, ["generate", "hello", flag, text or str(file)])
    assert [one.response_format for one in asked] == [form]
    # The fake models have no tokenizer.
    assert isinstance(result.exception, InvalidRequest)


@pytest.mark.parametrize(
    ("flag", "text"), [("--json-schema", ""), ("--regex", ""), ("--json-schema", None), ("--grammar", None)]
)
def test_an_empty_format_is_refused(
    flag: str, text: str | None, asked: list[GenerationRequest], tmp_path: Path
) -> None:
    """It was no format: a file that a script had cut short gave an output of any form."""
    file = tmp_path / "format"
    file.touch()
    result = CliRunner().invoke(app, ["generate", "hello", flag, str(file) if text is None else text])
    assert isinstance(result.exception, InvalidRequest)
    assert f"{flag} is empty" in result.exception.message
    assert asked == []


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
MESSAGES = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]
CONVERSATION = (
    ChatMessage("system", "be brief"),
    ChatMessage("user", "2 + 2?"),
    ChatMessage("assistant", tool_calls=(ToolCall("c1", "add", "{}"),)),
    ChatMessage("tool", "4", tool_call_id="c1"),
)


@pytest.mark.parametrize("is_piped", [False, True])
def test_a_conversation_comes_from_a_file_or_standard_input_as_the_gateway_reads_it(
    is_piped: bool, asked: list[GenerationRequest], tmp_path: Path
) -> None:
    messages, tools = tmp_path / "messages.json", tmp_path / "tools.json"
    messages.write_text(json.dumps(MESSAGES))
    tools.write_text(json.dumps([TOOL]))
    flags = ["--messages", "-" if is_piped else str(messages), "--tools", str(tools)]
    CliRunner().invoke(app, ["generate", *flags], input=messages.read_bytes() if is_piped else None)
    (prompt,) = [one.prompt for one in asked]
    assert isinstance(prompt, Chat)
    assert prompt.messages == CONVERSATION
    assert [json.loads(one) for one in prompt.tools] == [TOOL]


@pytest.mark.parametrize(
    ("arguments", "messages", "words"),
    [
        ([], None, "PROMPT or --messages is needed, and neither is given"),
        (["hello"], "[]", "PROMPT or --messages is needed, and both are given"),
        (["--raw"], "[]", "--raw has no template for --messages"),
        (["hello", "--tools", "-"], None, "--tools needs --messages"),
        ([], "{", "--messages - is no JSON"),
        ([], "{}", "--messages: messages"),
        ([], "[]", "--messages: messages"),
        ([], '[{"role": "user"}]', "--messages: messages[0].content is missing"),
    ],
)
def test_what_is_no_conversation_is_named_before_anything_starts(
    arguments: list[str], messages: str | None, words: str
) -> None:
    flags = [] if messages is None else ["--messages", "-"]
    result = CliRunner().invoke(app, ["generate", *arguments, *flags], input=messages)
    assert isinstance(result.exception, InvalidRequest)
    assert words in result.exception.message


def test_without_flags_a_request_says_nothing_of_drafts(asked: list[GenerationRequest]) -> None:
    CliRunner().invoke(app, ["generate", "hello", "--max-new-tokens", "6"])
    assert [(one.drafting, one.predicted_output) for one in asked] == [(DraftingOptions(), None)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--draft-sources", "sufix"], "--draft-sources has 'sufix'; give any of draft, suffix, prediction"),
        (["--forbid-sources", "unspecified"], "--forbid-sources has 'unspecified'"),
        (["--draft-sources", ""], "--draft-sources is empty"),
        (["--prediction", "/nowhere/at/all"], "--prediction /nowhere/at/all cannot be read"),
        (["--json-schema", "nowhere"], "--json-schema nowhere cannot be read"),
    ],
)
def test_wrong_words_about_drafts_are_named_before_anything_starts(flags: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["generate", "hello", *flags])
    assert isinstance(result.exception, InvalidRequest)
    assert words in result.exception.message


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands keep what they print until they end or have much of it, as they do for people."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@pytest.mark.usefixtures("buffered")
@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_a_full_disk_under_standard_output_is_said_in_one_line(flag: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "paceline", flag], stdout=full, stderr=PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "paceline: nothing more can be written: [Errno 28] No space left on device; make room and run it again\n"
    )


@pytest.mark.usefixtures("buffered")
def test_a_full_disk_under_another_file_keeps_what_was_printed() -> None:
    program = """
from pathlib import Path
from paceline.cli import app
def command():
    print("printed")
    Path("/dev/full").write_text("x")
app.app = command
app.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "printed\n")
    assert done.stderr.startswith("paceline: nothing more can be written: [Errno 28]")


def test_a_command_without_standard_output_ends_as_with_one() -> None:
    """What prints and what ends the command looked for it: a traceback, and exit status 1."""
    program = """
from paceline.cli import app
from paceline.cli.consoles import print_json, words_console
def command():
    print_json({"text": "é"})
    words_console().print("é")
    raise SystemExit(0)
app.app = command
app.main()
"""
    without = ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, program]
    done = subprocess.run(without, stderr=PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_line_of_a_summary_is_broken_where_it_is_no_terminal_that_reads_it() -> None:
    """At 80 columns the words of the summary stood on two lines of a file."""
    flags = ["--temperature", "1", "--seed", str(2**64 - 1), "--max-new-tokens", "20"]
    (line,) = CliRunner().invoke(app, ["generate", "hello", "--raw", *flags]).stderr.splitlines()
    assert line.endswith(f"seed {2**64 - 1}") and len(line) > 80


def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback() -> None:
    """What is imported takes a second or more, in which most mistyped commands are given up."""
    program = """
import runpy, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name.startswith("paceline.cli"):
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
runpy.run_module("paceline", run_name="__main__")
"""
    assert python_code(program) == (130, "", "")
