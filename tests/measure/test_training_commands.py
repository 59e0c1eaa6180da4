"""`python -m training`: what is wrong with its input is said in one line, and before minutes are spent on it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from paceline.builtin import resolve_model
from paceline.errors import InvalidRequest
from training.__main__ import run
from training.outputs import Output, read_outputs, write_outputs
from training.problems import load

TARGET = resolve_model("builtin:target")
PROBLEM = json.dumps({"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"})


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return the command's status and what it said on stderr."""
    monkeypatch.setattr(sys, "argv", ["training", *arguments])
    with pytest.raises(SystemExit) as ended:
        run()
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("target --data few.jsonl --work w", "--data few.jsonl has 2 problems, and nothing learns from the last 300"),
        ("target --data bad.jsonl --work w", "line 2 of --data bad.jsonl is no problem of GSM8K"),
        ("target --data few.jsonl --work w --device tpu", "--device"),
        ("target --data few.jsonl --work w --minutes -1", "--minutes"),  # it trained without end
        ("outputs --data few.jsonl --work w", "w/target has no tokenizer.json that can be read"),
        ("outputs --data few.jsonl --work w --invented --unseen", "--invented and --unseen name two kinds"),
        ("answers --target {target} --prompts bad.jsonl --outputs o.json", "bad.jsonl is no JSON list of texts"),
        ("answers --target {target} --prompts none.json --outputs o.json", "none.json has no prompts of up to"),
        ("answers --target {target} --prompts none.json --outputs bad.jsonl/o.json", "File exists: 'bad.jsonl'"),
        ("heads --target {target} --outputs none.json --folder h", "none.json has no outputs to learn from"),
        ("heads --target {target} --outputs none.json --folder h --kind best", "--kind is 'best'; give one of medusa"),
        ("heads --target {target} --outputs none.json --folder h --steps -1", "--steps"),
        (
            "heads --target {target} --outputs one.json --folder h --start-from {target}",
            "--start-from {target} has no weights of clover heads for this target and --draft-count 3",
        ),
        (
            "heads --target {target} --outputs one.json --folder h --features one.json",
            "--features one.json has no features",
        ),
        ("grid --target {target} --outputs one.json --folder g", "one.json has no prompt that is not held out"),
        (
            "grid --target {target} --outputs one.json --held held.json --folder g --lessons none.json",
            "--lessons none.json has no lessons",
        ),
        ("grid --target {target} --outputs other.json --folder g", "other.json has token id 99999, and the target has"),
        (
            "grid --target {target} --outputs one.json --held other.json --folder g",
            "other.json has token id 99999, and the target has",
        ),
        ("heads --target empty --outputs one.json --folder h", "empty has no model that can be read"),
        ("heads --target short --outputs one.json --folder h", "short has no model that can be read"),
        ("grid --target strange --outputs one.json --folder g", "strange has no <|pad|>, <|end|>, <|user|>"),
    ],
)
def test_wrong_input_is_said_in_words(
    arguments: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Each was a traceback, but for --minutes -1."""
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text(f"{PROBLEM}\n{PROBLEM}\n")
    Path("bad.jsonl").write_text(f'{PROBLEM}\n{{"question": "1+1?"}}\n')
    Path("none.json").write_text("[]")
    Path("one.json").write_text(json.dumps([{"token_ids": [5, 6, 7, 8], "prompt_count": 2}]))
    Path("held.json").write_text(json.dumps([{"token_ids": [5, 9, 7, 8], "prompt_count": 2}]))
    Path("other.json").write_text(json.dumps([{"token_ids": [5, 6, 99999], "prompt_count": 2}]))
    Path("empty").mkdir()
    Path("empty/config.json").write_text("{}")
    shutil.copytree(TARGET, "short", ignore=lambda *_: ["model.safetensors"])
    Path("short/model.safetensors").write_bytes(b"\xff" * 20)
    Path("strange").mkdir()
    Tokenizer(BPE()).save("strange/tokenizer.json")
    status, err = said(monkeypatch, capsys, *arguments.format(target=TARGET).split())
    assert status != 0
    assert words.format(target=TARGET) in err


def test_problems_are_parted_at_line_ends_alone(tmp_path: Path) -> None:
    """A question may hold U+2028, which is no end of a line of JSON."""
    path = tmp_path / "train.jsonl"
    row = json.dumps({"question": "1+1?\u2028Say.", "answer": "2\n#### 2"}, ensure_ascii=False)
    path.write_text(f"{row}\r\n\n" * 301, encoding="utf-8")
    seen, unseen = load(path)
    assert ([one.question for one in seen], len(unseen)) == (["1+1? Say."], 300)


@pytest.mark.parametrize(
    "row",
    [{}, {"token_ids": [5], "prompt_count": 1}, {"token_ids": [5, -6], "prompt_count": 1}, {"token_ids": [5, 6]}],
)
def test_what_is_no_output_is_refused(row: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "outputs.json"
    right = {"token_ids": [5, 6], "prompt_count": 1}
    path.write_text(json.dumps([right]))
    assert read_outputs(path, 7) == [Output((5, 6), 1)]
    path.write_text(json.dumps([right, row]))
    with pytest.raises(InvalidRequest, match=r"(output |file|has no outputs: )1.*training outputs"):
        read_outputs(path, 7)


def test_outputs_of_earlier_hours_stay_where_none_are_made(tmp_path: Path) -> None:
    """A run whose minutes were over before its services listened wrote an empty list over them."""
    path = tmp_path / "outputs.json"
    write_outputs(path, made := [Output((5, 6), 1)])
    with pytest.raises(InvalidRequest, match="no output was made"):
        write_outputs(path, [])
    assert read_outputs(path, 7) == made
