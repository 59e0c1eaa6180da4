"""`paceline load` from its flags to its files, with services of its own."""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from paceline.client import Client
from paceline.process.cluster_plan import ClusterOptions
from tests.clusters import cluster_here
from tests.commands import ended, paceline_here, start


def test_load_reports_every_request_and_leaves_a_file_and_a_plot(tmp_path: Path, services_here: None) -> None:
    flags = ["--rate", "40", "--requests", "6", "--max-new-tokens", "6", "--output", str(tmp_path / "results")]
    status, out, err = paceline_here("load", *flags, "--slo-ttft-ms", "60000")
    assert (status, err) == (0, "")
    assert "6 completed, 0 rejected, 0 failed, 0 unfinished" in out
    assert "6 of 6 within the objectives" in out
    content = json.loads((tmp_path / "results" / "load.json").read_text())
    assert content["settings"]["rate_per_s"] == 40
    assert content["summary"]["counts"]["completed"] == 6
    assert all(row["usage"]["queued_s"] >= 0 for row in content["requests"])
    assert (tmp_path / "results" / "load.png").read_bytes().startswith(b"\x89PNG")


def test_load_says_why_requests_were_refused_and_fails_where_all_were(tmp_path: Path, services_here: None) -> None:
    flags = ["--rate", "40", "--requests", "3", "--max-new-tokens", "100000", "--output", str(tmp_path), "--no-plot"]
    status, out, _ = paceline_here("load", *flags)
    assert status == 1
    (line,) = (one for one in out.splitlines() if one.startswith("3 times PROMPT_TOO_LONG: max_new_tokens is 100000;"))
    assert line.endswith("this model's maximum context length is 4096")
    assert json.loads((tmp_path / "load.json").read_text())["summary"]["counts"]["failed"] == 3


def test_load_sends_what_drafts_may_come_from(tmp_path: Path, services_here: None) -> None:
    flags = ["--rate", "40", "--requests", "2", "--max-new-tokens", "6", "--output", str(tmp_path), "--no-plot"]
    status, _, err = paceline_here("load", *flags, "--draft-sources", "suffix,heads", "--forbid-sources", "draft")
    assert (status, err) == (0, "")
    content = json.loads((tmp_path / "load.json").read_text())
    assert content["settings"]["drafting"] == {
        "sources": ["suffix", "heads"],
        "in_order": False,
        "forbidden_sources": ["draft"],
        "draft_model": "",
    }
    assert content["summary"]["counts"]["completed"] == 2
    assert {one["source"] for one in content["summary"]["sources"]} <= {"suffix"}


@pytest.mark.slow
async def test_an_interrupted_load_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    async with cluster_here(ClusterOptions()) as addresses:
        flags = ["--rate", "100", "--max-new-tokens", "4", "--duration-s", "36000", "--output", str(tmp_path)]
        process = await start("paceline", "load", "--address", addresses.coordinator, *flags)
        async with Client(addresses.coordinator) as client:
            while (await client.describe()).statistics.round_count < 20:
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        status, out, err = await ended(process)
    assert status == 130
    assert "interrupted; the results are those until then" in out
    assert "Traceback" not in err
    content = json.loads((tmp_path / "load.json").read_text())
    assert content["settings"]["rate_per_s"] == 100
    assert content["summary"]["counts"]["completed"] > 0
    assert len(content["requests"]) == sum(content["summary"]["counts"].values())


def test_load_says_what_is_wrong_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": ""}')
    for arguments, words in [
        (["--rate", "0"], "0.0 is no rate"),
        (["--rate", "nan"], "nan is no rate"),
        (["--rate", "1", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (["--rate", "1", "--draft-sources", "luck"], "--draft-sources has 'luck'"),
        (["--rate", "1", "--address", "127.0.0.1:1"], "127.0.0.1:1"),
        (["--rate", "1", "--input", str(tmp_path / "in.jsonl")], "has no line with a prompt"),
        (["--rate", "1", "--output", str(tmp_path / "in.jsonl")], "cannot be written"),
    ]:
        if "--output" not in arguments:
            arguments += ["--output", str(tmp_path / "out")]
        status, _, err = paceline_here("load", *arguments)
        assert status in (1, 2)
        assert words in " ".join(err.replace("│", " ").split())
        assert "Traceback" not in err
