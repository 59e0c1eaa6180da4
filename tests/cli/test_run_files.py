"""`paceline run` and files: only a complete output replaces a file, and no answer is lost."""

import fcntl
import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.app import app
from paceline.cli.run.partial_outputs import PartialOutputs
from paceline.client import Completion
from paceline.codec.generation import request_to_pb
from paceline.errors import CallTimedOut, InvalidRequest, PeerUnavailable
from paceline.types import DraftingOptions, DraftSource, GenerationRequest, Text
from tests.commands import python_code
from tests.fakes.answering import AnsweringClient, answering, fails

pytestmark = pytest.mark.review

PROMPTS = ["a", "b", "c", "d", "e"]
FORMER = "what a user made before\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with `in.jsonl`."""
    monkeypatch.chdir(tmp_path)
    write_input(PROMPTS)
    return tmp_path


def write_input(prompts: list[Any]) -> None:
    Path("in.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))


def run(client: AnsweringClient, *flags: str, output: str = "out.jsonl") -> Result:
    with answering(client):
        return CliRunner().invoke(app, ["run", "--input", "in.jsonl", "--output", output, *flags])


def refusal(client: AnsweringClient, *flags: str, output: str = "out.jsonl") -> str:
    """Run the command, which must be refused before any prompt is sent; return its message."""
    result = run(client, *flags, output=output)
    assert client.prompts == []
    assert isinstance(result.exception, InvalidRequest)
    return result.exception.message


def outputs(path: str = "out.jsonl") -> list[Any]:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [row.get("text", row.get("error")) for row in rows]


def lose_at_d(client: AnsweringClient | None = None) -> Result:
    """Run the command until the coordinator is lost at prompt D; the other four prompts are answered."""
    client = client or AnsweringClient()

    def lose(prompt: str) -> None:
        if prompt == "d":
            client.is_lost = True
            raise PeerUnavailable("the coordinator is gone")

    client.before = lose
    return run(client)


PARTIAL = Path("out.jsonl.partial")
GO_ON = "lines are answered in out.jsonl.partial: the same command with --resume goes on from there"


def test_an_output_stays_as_it_was_when_no_coordinator_is_there(folder: Path) -> None:
    """Review G1: the output was emptied before the connection was tried."""
    Path("out.jsonl").write_text(FORMER)
    assert isinstance(run(AnsweringClient(is_lost=True)).exception, PeerUnavailable)
    assert Path("out.jsonl").read_text() == FORMER
    assert sorted(os.listdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_an_output_that_is_the_input_is_refused_by_whatever_name(
    folder: Path, link: Callable[[str, str], None] | None
) -> None:
    """Review G1: the input was lost."""
    before = Path("in.jsonl").read_text()
    if link:
        link("in.jsonl", "out.jsonl")
    words = refusal(AnsweringClient(), output="out.jsonl" if link else "../" + folder.name + "/in.jsonl")
    assert "is the same file as --input in.jsonl; name another" in words
    assert Path("in.jsonl").read_text() == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_run_keeps_its_answers_and_resume_asks_for_the_rest(
    folder: Path, number: signal.Signals, status: int
) -> None:
    """Review G1: the former output was lost at once, and the answers could not be resumed."""
    Path("out.jsonl").write_text(FORMER)
    found, err = run_apart(f"run_interrupted('e', {int(number)}, *FLAGS)")
    assert found == status, err
    assert Path("out.jsonl").read_text() == FORMER
    assert (f"4 of 5 {GO_ON}" in err) == (number is not signal.SIGKILL)
    client = AnsweringClient()
    assert run(client, "--resume").exit_code == 0
    assert client.prompts == ["e"]
    assert outputs() == ["A", "B", "C", "D", "E"]
    assert sorted(os.listdir()) == ["in.jsonl", "out.jsonl"]


def test_a_full_disk_ends_a_run_with_words_and_what_was_written_is_gone_on_with(folder: Path) -> None:
    write_input([letter * 200 for letter in "abcde"])
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    status, err = run_apart(f"{limit}; run_interrupted('', 0, *FLAGS)")
    assert status == 1
    assert "out.jsonl.partial cannot be written: [Errno 27] File too large" in err
    assert f"2 of 5 {GO_ON}" in err
    client = AnsweringClient()
    assert run(client, "--resume").exit_code == 0
    assert [prompt[0] for prompt in client.prompts] == ["c", "d", "e"]
    assert [text[0] for text in outputs()] == ["A", "B", "C", "D", "E"]


def run_apart(code: str) -> tuple[int, str]:
    """Run code in its own process; return its status and output."""
    flags = ["--input", "in.jsonl", "--output", "out.jsonl"]
    status, _, err = python_code(f"from tests.fakes.answering import run_interrupted; FLAGS = {flags}; {code}")
    return status, err


def test_a_lost_coordinator_ends_a_run_and_fails_no_line(folder: Path) -> None:
    """Review G1: every later line was written as failed, over the former output."""
    result = lose_at_d()
    assert isinstance(result.exception, PeerUnavailable)
    assert f"4 of 5 {GO_ON}" in result.stderr
    client = AnsweringClient()
    assert run(client, "--resume").exit_code == 0
    assert client.prompts == ["d"]
    assert outputs() == ["A", "B", "C", "D", "E"]


def test_a_line_that_fails_alone_is_tried_again_and_a_wrong_one_is_no_reason_to(folder: Path) -> None:
    write_input([*PROMPTS, 5])
    client = AnsweringClient(fails("b", CallTimedOut("too slow")))
    result = run(client, "--timeout", "9")
    assert (result.exit_code, client.timeout_s) == (1, 9)
    assert "4 of 6 lines answered" in result.stderr
    assert f"4 of 6 {GO_ON}" in result.stderr
    assert outputs() == ["A", "too slow", "C", "D", "E", "line 6 has neither a `prompt` string nor `turns` with one"]
    client = AnsweringClient()
    result = run(client, "--resume")
    assert (result.exit_code, client.prompts) == (1, ["b"])
    assert outputs()[:2] == ["A", "B"]
    assert not PARTIAL.exists()


def test_a_line_that_no_call_can_carry_fails_alone(folder: Path) -> None:
    """Half a surrogate pair ended the whole run with a traceback."""
    write_input(["a", "half \ud83d", "b"])
    client = AnsweringClient()

    async def complete(request: GenerationRequest, *, timeout_s: float | None = None) -> Completion:
        request_to_pb(request)  # as a client does
        return await AnsweringClient.complete(client, request, timeout_s=timeout_s)

    with patch.object(client, "complete", complete):
        assert run(client).exit_code == 1
    one, words, other = outputs()
    assert (one, other) == ("A", "B")
    assert "half a surrogate pair" in words


def test_when_every_line_failed_all_are_tried_again(folder: Path) -> None:
    write_input(["b"])
    assert run(AnsweringClient(fails("b", CallTimedOut("too slow")))).exit_code == 1
    assert run(AnsweringClient(), "--resume").exit_code == 0
    assert outputs() == ["B"]


def test_a_line_cut_off_in_the_partial_output_is_asked_again(folder: Path) -> None:
    lose_at_d()
    PARTIAL.write_bytes(PARTIAL.read_bytes()[:-3])
    client = AnsweringClient()
    assert run(client, "--resume").exit_code == 0
    assert client.prompts == ["d", "e"]
    assert outputs() == ["A", "B", "C", "D", "E"]


def test_work_of_an_interrupted_run_is_never_dropped_unasked(folder: Path) -> None:
    lose_at_d()
    kept = PARTIAL.read_bytes()
    words = refusal(AnsweringClient())
    assert "out.jsonl.partial has answers of a run that did not end: give --resume" in words
    assert "or delete it" in words
    assert PARTIAL.read_bytes() == kept


def test_what_is_of_another_run_is_not_gone_on_with(folder: Path) -> None:
    lose_at_d()
    kept = PARTIAL.read_bytes()
    for flags, words in [
        (["--temperature", "0.5"], "there temperature is 0.0, and here 0.5"),
        (["--max-new-tokens", "9"], "there max_new_tokens is 256, and here 9"),
        (["--seed", "3"], "there seed is None, and here 3"),
    ]:
        assert words in refusal(AnsweringClient(), "--resume", *flags)
    assert "there model is 'target', and here 'other'" in refusal(AnsweringClient(model="other"), "--resume")
    write_input([*PROMPTS[:-1], "another"])
    assert "there input is '" in refusal(AnsweringClient(), "--resume")
    assert PARTIAL.read_bytes() == kept
    PARTIAL.write_text("notes of a user\n")
    assert "is not what an interrupted `paceline run` leaves" in refusal(AnsweringClient(), "--resume")
    assert PARTIAL.read_text() == "notes of a user\n"


def test_lines_that_no_run_wrote_count_for_nothing(folder: Path) -> None:
    """They ended a resumed run by a traceback, once all its prompts were answered."""
    lose_at_d()
    with PARTIAL.open("a") as partial:
        partial.write('{"line": "x"}\n{"line": 4}\n{"line": [1], "output": {}}\n')
    client = AnsweringClient()
    assert run(client, "--resume").exit_code == 0
    assert client.prompts == ["d"]
    assert len(outputs()) == len(PROMPTS)


def test_a_run_that_was_killed_before_it_wrote_anything_begins_anew(folder: Path) -> None:
    PARTIAL.write_bytes(b"")
    assert run(AnsweringClient(), "--resume").exit_code == 0
    assert len(outputs()) == len(PROMPTS)


def test_a_model_is_the_one_that_a_run_was_begun_with_by_its_digest_whatever_its_name(folder: Path) -> None:
    """Review C1: other weights under the same name counted as the same model."""
    lose_at_d(AnsweringClient(model_digest="1" * 64))
    other = AnsweringClient(model_digest="2" * 64)
    assert "there model_digest is '1111" in refusal(other, "--resume")
    assert run(AnsweringClient(model="elsewhere", model_digest="1" * 64), "--resume").exit_code == 0
    assert outputs() == ["A", "B", "C", "D", "E"]


def test_resume_begins_where_nothing_is_and_asks_nothing_again_where_all_is(folder: Path) -> None:
    assert run(AnsweringClient(), "--resume").exit_code == 0
    assert outputs() == ["A", "B", "C", "D", "E"]
    assert "out.jsonl is whole" in refusal(AnsweringClient(), "--resume")


def test_what_another_run_is_writing_is_left_to_it(folder: Path) -> None:
    lose_at_d()
    with PARTIAL.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another run is writing out.jsonl.partial" in refusal(AnsweringClient(), "--resume")
    assert run(AnsweringClient(), "--resume").exit_code == 0


def test_of_two_runs_begun_together_the_later_leaves_the_answers_of_the_other_alone(folder: Path) -> None:
    """The later run took the other's file for an unwritable one of its own, and deleted it."""
    with closing(PartialOutputs(Path("out.jsonl"), {}, resume=False)) as first:
        with closing(PartialOutputs(Path("out.jsonl"), {}, resume=False)) as later:
            first.add(0, {"text": "A"})
            with pytest.raises(InvalidRequest, match=r"another run is writing out\.jsonl\.partial.*another --output"):
                later.add(0, {"text": "later"})
            later.publish({0: {"error": "wrong"}}, again=False)
        first.add(1, {"text": "B"})
        assert len(PARTIAL.read_text().splitlines()) == 3
        first.publish({}, again=False)
    assert outputs() == ["A", "B"]
    assert not PARTIAL.exists()


def test_an_output_that_is_no_file_is_written_to_and_stays_what_it_is(folder: Path) -> None:
    os.symlink("/dev/null", "out.jsonl")
    assert run(AnsweringClient()).exit_code == 0
    assert Path("/dev/null").is_char_device()
    assert sorted(os.listdir()) == ["in.jsonl", "out.jsonl"]
    assert "--resume needs a file" in refusal(AnsweringClient(), "--resume")


def test_the_answers_of_a_linked_output_lie_beside_what_the_link_leads_to(folder: Path) -> None:
    """Answers lay beside the link, so the run could not be resumed by the output's other name."""
    Path("elsewhere").mkdir()
    os.symlink("elsewhere/real.jsonl", "out.jsonl")
    lose_at_d()
    assert not PARTIAL.exists()
    assert run(AnsweringClient(), "--resume", output="elsewhere/real.jsonl").exit_code == 0
    assert outputs() == ["A", "B", "C", "D", "E"]
    assert Path("out.jsonl").is_symlink()
    assert os.listdir("elsewhere") == ["real.jsonl"]


def test_an_output_that_is_an_open_file_is_the_file_of_that_name(folder: Path) -> None:
    """As `/dev/stdout` is one: the answers would have been written beside it, in `/dev`."""
    with Path("real.jsonl").open("wb") as file:
        result = run(AnsweringClient(), output=f"/dev/fd/{file.fileno()}")
    assert result.exit_code == 0, result.exception
    assert outputs("real.jsonl") == ["A", "B", "C", "D", "E"]
    assert sorted(os.listdir()) == ["in.jsonl", "real.jsonl"]


def test_a_pipe_and_a_file_without_a_name_are_written_to(folder: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as end, TemporaryFile(dir=".") as nameless:
        for number in (writing, nameless.fileno()):
            assert run(AnsweringClient(), output=f"/dev/fd/{number}").exit_code == 0
        os.close(writing)
        whole = end.read()
        assert [json.loads(line)["text"] for line in whole.splitlines()] == ["A", "B", "C", "D", "E"]
        assert nameless.read().decode() == whole
    assert os.listdir() == ["in.jsonl"]


@pytest.mark.parametrize("output", [".", "x" * 300, "in.jsonl/out.jsonl"])
def test_an_output_that_cannot_be_is_refused_with_words(folder: Path, output: str) -> None:
    assert f"--output {output} cannot be written" in refusal(AnsweringClient(), output=output)


def test_each_line_has_its_own_prediction_and_all_have_the_drafting_of_the_flags(folder: Path) -> None:
    rows = [{"prompt": "a", "prediction": "A"}, {"prompt": "b"}]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    client = AnsweringClient()
    assert run(client, "--draft-sources", "prediction,suffix", "--only-draft-model", "small").exit_code == 0
    options = DraftingOptions((DraftSource.PREDICTION, DraftSource.SUFFIX), draft_model="small")
    found = {request.prompt: (request.predicted_output, request.drafting) for request in client.requests}
    assert found == {Text("a"): (Text("A"), options), Text("b"): (None, options)}


def test_a_run_says_once_which_sources_its_coordinator_lacks(folder: Path) -> None:
    rows = [{"prompt": "a", "prediction": "A"}, {"prompt": "b", "prediction": "B"}]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = run(AnsweringClient(sources=(DraftSource.DRAFT,)), "--draft-sources", "prediction,suffix").stderr
    assert told.count("has no suffix and no prediction, so nothing drafts for this: the output is the same") == 1
    assert "the coordinator has no" not in run(AnsweringClient(), "--draft-sources", "prediction,suffix").stderr


def test_a_run_may_be_resumed_with_other_drafts_for_no_answer_depends_on_them(folder: Path) -> None:
    assert lose_at_d().exit_code != 0
    client = AnsweringClient()
    assert run(client, "--resume", "--forbid-sources", "suffix").exit_code == 0
    assert client.prompts == ["d"]


def test_the_output_goes_to_standard_output_where_a_minus_says_so(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was a file of that name, though `--input -` is standard input."""
    assert run(AnsweringClient(), output="-").exit_code == 0
    assert [json.loads(line)["prompt"] for line in capfd.readouterr().out.splitlines()] == PROMPTS
    assert sorted(os.listdir()) == ["in.jsonl"]


def test_standard_output_keeps_what_was_written_to_it_before(folder: Path) -> None:
    """`>> out.jsonl` lost what was there, and of two commands with one output the first one's was left."""
    Path("out.jsonl").write_text(json.dumps({"text": "former"}) + "\n")
    own = os.dup(1)
    try:
        with Path("out.jsonl").open("ab") as file:
            os.dup2(file.fileno(), 1)
        codes = [run(AnsweringClient(), output="-").exit_code for _ in range(2)]
    finally:
        os.dup2(own, 1)
        os.close(own)
    assert codes == [0, 0]
    assert outputs() == ["former", *"ABCDE", *"ABCDE"]
    assert sorted(os.listdir()) == ["in.jsonl", "out.jsonl"]
