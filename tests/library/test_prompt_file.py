"""Prompt files: accepted lines, and lines that are reported and skipped."""

from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from paceline.errors import InvalidRequest
from paceline.prompt_file import InputLine, read_lines


def test_prompts_and_spec_bench_lines_are_taken_and_wrong_ones_named_by_number(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"prompt": "a\u2028b"}\n\n{"question_id": 81, "category": "qa", "turns": ["first", "second"]}\n{half\n[1]\n'
        '{"id": "x", "prompt": 5}\n{"turns": []}\n{"id": null, "prompt": ""}',
        encoding="utf-8",
    )
    lines = read_lines(path)
    assert lines[:2] == [InputLine(1, "a\u2028b"), InputLine(81, "first", category="qa")]
    assert [line.prompt for line in lines[2:]] == [None, None, None, None, ""]
    assert [line.id for line in lines[2:]] == [4, 5, "x", 7, None]
    for number, line in zip((4, 5, 6, 7), lines[2:6], strict=True):
        assert line.error is not None
        assert line.error.startswith(f"line {number} ")


def test_a_prompt_that_is_null_is_none_so_turns_count(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "x", "prompt": null, "turns": ["a"]}\n{"prompt": "b", "turns": null}')
    assert read_lines(tmp_path / "in.jsonl") == [InputLine("x", "a"), InputLine(2, "b")]


def test_a_mark_of_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}', encoding="utf-8-sig")
    assert read_lines(tmp_path / "in.jsonl") == [InputLine(1, "a")]


def test_a_line_may_say_which_output_is_expected(tmp_path: Path) -> None:
    lines = (
        '{"prompt": "a", "prediction": "b"}',
        '{"turns": ["a"], "prediction": null}',
        '{"prompt": "a", "prediction": 5}',
    )
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    with_one, without, wrong = read_lines(tmp_path / "in.jsonl")
    assert with_one == InputLine(1, "a", prediction="b")
    assert without == InputLine(2, "a")
    assert (wrong.prompt, wrong.error) == (None, "line 3 has a `prediction` that is no string")


@pytest.mark.parametrize("number", ["9" * 5000, "[" * 100_000])
def test_a_line_that_python_cannot_hold_is_wrong_alone(tmp_path: Path, number: str) -> None:
    (tmp_path / "in.jsonl").write_text(f'{{"prompt": "a", "id": {number}}}\n{{"prompt": "b"}}')
    wrong, right = read_lines(tmp_path / "in.jsonl")
    assert wrong.prompt is None
    assert wrong.error is not None
    assert wrong.error.startswith("line 1 is not JSON: ")
    assert right.prompt == "b"


@pytest.mark.review
def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """review G11"""
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO('{"prompt": "ä"}\n'.encode())))
    assert read_lines(Path("-")) == [InputLine(1, "ä")]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
def test_a_file_without_lines_or_not_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"in\.jsonl"):
        read_lines(tmp_path / "in.jsonl")
