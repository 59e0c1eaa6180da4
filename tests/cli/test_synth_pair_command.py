"""`paceline synth-pair` from its flags to a pair that other commands run."""

import json
from pathlib import Path

from tests.commands import paceline_here


def test_a_written_pair_answers_prompts_and_says_that_it_is_synthetic(tmp_path: Path, services_here: None) -> None:
    folder = tmp_path / "pair"
    status, out, err = paceline_here("synth-pair", "--shape", "100m/5m", "--factor", "0.5", "--output", str(folder))
    assert (status, err) == (0, "")
    assert "synthetic pair of the shape 100m/5m, factor 0.5, seed 0" in " ".join(out.split())
    assert "99.5 M parameters, float32" in out
    # review G10: no file may be more private than the others.
    assert len({file.stat().st_mode for file in (folder / "target").iterdir()}) == 1
    models = ["--target-model", str(folder / "target"), "--draft-model", str(folder / "draft")]
    (tmp_path / "in.jsonl").write_text('{"prompt": "Two and two"}')
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    status, _, _ = paceline_here("run", *models, *files, "--max-new-tokens", "13")
    assert status == 0
    answer = json.loads((tmp_path / "out.jsonl").read_text())
    assert answer["text"]
    # At so small a factor no link is lost: every draft is right.
    assert answer["usage"]["accepted_count"] == answer["usage"]["drafted_count"] > 0


def test_synth_pair_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for arguments, words in [
        (["--shape", "huge", "--output", str(tmp_path / "pair")], "'huge' is not one of 100m/5m"),
        (["--shape", "100m/5m", "--output", str(tmp_path)], "is not empty"),
        (["--shape", "100m/5m", "--acceptance", "1.5", "--output", str(tmp_path / "pair")], "--acceptance"),
        (["--shape", "100m/5m", "--factor", "inf", "--output", str(tmp_path / "pair")], "inf scales weights to no"),
    ]:
        status, _, err = paceline_here("synth-pair", *arguments)
        assert status in (1, 2)
        assert words in " ".join(err.replace("│", " ").split())
        assert "Traceback" not in err
