"""`paceline bench` and `paceline equivalence`, complete, with little work."""

import json
import os
import signal
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.engine import runner
from paceline.measure.bench import bench
from paceline.measure.bench.result import bench_result_from_json
from paceline.measure.cluster import ClusterSystem
from paceline.measure.contention import Contention, Moment
from tests.commands import ended, paceline_here, start
from tests.conftest import PairOfCheckpoints
from tests.fakes.watches import FakeWatch
from tests.waits import until

SMALL = ("--prompt-count", "3", "--max-new-tokens", "8", "--batch-sizes", "2")
BENCH = ("bench", *SMALL, "--systems", "hf,speculative")
OURS = ("bench", *SMALL, "--systems", "speculative")
EQUIVALENCE = ("equivalence", *SMALL, "--policies", "continuous", "--dtypes", "float32")


def test_a_bench_leaves_its_result_a_table_and_two_plots(
    tmp_path: Path, services_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beside other tests no run is quiet, and each would be repeated.
    monkeypatch.setattr(bench, "MachineWatch", FakeWatch)
    status, out, err = paceline_here(*BENCH, "--runs", "2", "--output", str(tmp_path))
    assert status == 0, err
    assert sorted(os.listdir(tmp_path)) == ["result.json", "round.png", "table.md", "throughput.png"]
    result = bench_result_from_json((tmp_path / "result.json").read_text())
    assert [(one.spec.label, len(one.runs)) for one in result.systems] == [
        ("HF generate", 2),
        ("Paceline, 5 drafts", 2),
    ]
    for system in result.systems:
        assert system.mismatch_count == 0
        assert all(0 < run.output_count <= 3 * 8 for run in system.runs)
    ours = result.systems[1]
    assert ours.rounds is not None
    assert ours.rounds.committed_count == sum(run.output_count for run in ours.runs)
    assert 1 <= ours.rounds.tokens_per_row <= 6
    assert min(ours.rounds.seconds.values()) >= 0
    assert sum(one.drafted_count for one in ours.rounds.sources) == ours.rounds.drafted_count > 0
    assert len(ours.prompt_passes) == 2
    assert (tmp_path / "table.md").read_text().strip() in out


@pytest.mark.parametrize(("command", "flag"), [("bench", "--draft-counts"), ("equivalence", "--draft-count")])
@pytest.mark.parametrize("word", ["65", "-1", "many"])
def test_a_draft_count_that_no_coordinator_takes_is_refused_before_anything_starts(
    command: str, flag: str, word: str, tmp_path: Path
) -> None:
    """The coordinator refused it, after models had been loaded and the systems before it had started."""
    folder = tmp_path / "results"
    status, _, err = paceline_here(command, *SMALL, f"{flag}={word}", "--output", str(folder))
    assert (status, folder.exists()) == (1, False)
    assert f"{flag} " in err and f"'{word}'; give 0 to 64, or auto" in err


class InterruptedWatch(FakeWatch):
    """Sends this process a signal in the middle of the runs."""

    def __init__(self, interruption: signal.Signals) -> None:
        super().__init__()
        self._interruption = interruption

    def since(self, began: Moment) -> Contention:
        found = super().since(began)
        if self.watched_count == 5:
            signal.raise_signal(self._interruption)
        return found


@pytest.mark.parametrize(("interruption", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_bench_keeps_and_shows_what_it_measured(
    interruption: signal.Signals,
    expected: int,
    tmp_path: Path,
    services_here: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "MachineWatch", partial(InterruptedWatch, interruption))
    status, out, _ = paceline_here(*OURS, "--runs", "1000", "--output", str(tmp_path))
    assert status == expected
    result = bench_result_from_json((tmp_path / "result.json").read_text())
    assert 0 < sum(len(one.runs) for one in result.systems) < 2000
    assert (tmp_path / "table.md").read_text().strip() in out
    assert (tmp_path / "throughput.png").exists()


@pytest.mark.long
@pytest.mark.parametrize("interruption", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_bench_leaves_no_service_behind(interruption: signal.Signals, tmp_path: Path) -> None:
    process = await start("paceline", *OURS, "--runs", "1000", "--output", str(tmp_path))
    await until((tmp_path / "result.json").exists)
    services = psutil.Process(process.pid).children()
    process.send_signal(interruption)
    await ended(process)
    assert not [one for one in services if one.is_running()]


def test_equivalence_fails_exactly_when_outputs_differ_from_the_reference(tmp_path: Path, services_here: None) -> None:
    status, out, err = paceline_here(*EQUIVALENCE, "--output", str(tmp_path))
    assert status == 0, err
    agreements = json.loads((tmp_path / "equivalence.json").read_text())["agreements"]
    assert [(one["system"], one["reference"]) for one in agreements] == [
        ("plain", "Hugging Face"),
        ("speculative", "Hugging Face"),
        ("speculative", "plain decoding"),
    ]
    assert all(not one["mismatches"] and one["rates"][0]["exact_count"] == 3 for one in agreements)
    assert out.count("3 of 3") == 3

    # References are read again from the folder, so outputs are compared with the changed one.
    reference = tmp_path / "reference-float32.jsonl"
    rows = [json.loads(line) for line in reference.read_text().splitlines()]
    right = rows[1]["token_ids"][4]
    rows[1]["token_ids"][4] = right + 1
    reference.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, _ = paceline_here(*EQUIVALENCE, "--output", str(tmp_path))
    assert status == 1
    agreements = json.loads((tmp_path / "equivalence.json").read_text())["agreements"]
    (mismatch,) = agreements[1]["mismatches"]
    assert (mismatch["prompt_id"], mismatch["position"]) == ("9", 4)
    assert (mismatch["expected_token_id"], mismatch["token_id"]) == (right + 1, right)
    assert mismatch["logit_gap"] < 0
    assert "prompt 9 (all), token 4" in out
    assert not agreements[2]["mismatches"]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("bench", ("--systems", "hf-assisted", "--draft-model", "none")),
        ("bench", ("--systems", "speculative", "--policies", "eqspec", "--source-sets", "suffix")),
        ("bench", ("--systems", "speculative", "--draft-model", "none", "--source-sets", "draft")),
        ("bench", ("--systems", "speculative", "--source-sets", "heads")),
        ("equivalence", ("--policies", "eqspec,exspec", "--source-sets", "suffix,prediction")),
        ("equivalence", ("--draft-count", "0")),
        ("equivalence", ("--draft-model", "none", "--source-sets", "draft")),
        ("equivalence", ("--draft-model", "none", "--policies", "eqspec")),
    ],
)
def test_a_measurement_of_nothing_is_refused_before_it_begins(
    command: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    status, out, err = paceline_here(command, *SMALL, *flags, "--output", str(tmp_path))
    assert (status, out) == (1, "")
    words = (
        "only a draft service drafts",
        "leaves nothing to measure",
        "leaves plain decoding to",
        "of which nothing drafts",
    )
    assert any(one in err for one in words)
    assert not os.listdir(tmp_path)


def test_sampled_outputs_must_equal_those_of_plain_decoding_with_the_same_seed(
    tmp_path: Path, services_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agreements() -> tuple[int, list[dict[str, Any]]]:
        status, _, _ = paceline_here(*EQUIVALENCE, "--temperature", "0.8", "--output", str(tmp_path))
        result = json.loads((tmp_path / "equivalence.json").read_text())
        assert result["temperature"] == 0.8
        return status, result["agreements"]

    status, (only,) = agreements()
    assert (status, only["system"], only["reference"]) == (0, "speculative", "plain decoding")
    assert only["must_hold"] and not only["mismatches"]
    assert not list(tmp_path.glob("reference*"))

    asked = ClusterSystem._request
    seeds = count()
    monkeypatch.setattr(ClusterSystem, "_request", lambda *given: replace(asked(*given), seed=next(seeds)))
    status, (only,) = agreements()
    assert (status, len(only["mismatches"])) == (1, 3)


def test_equivalence_compares_every_source_alone_and_all_together(tmp_path: Path, services_here: None) -> None:
    alone, together = ("draft", "suffix", "prediction"), "draft+suffix+prediction"
    sets = ("--source-sets", ",".join((*alone, together)), "--draft-count", "auto")
    status, out, err = paceline_here(*EQUIVALENCE, *sets, "--output", str(tmp_path))
    assert status == 0, err
    agreements = json.loads((tmp_path / "equivalence.json").read_text())["agreements"]
    assert [one["sources"] for one in agreements[1::2]] == [[name] for name in alone] + [list(alone)]
    assert all(one["must_hold"] and not one["mismatches"] for one in agreements)
    assert f"float32 speculative, continuous, {together} " in out


def test_strict_outputs_of_targets_that_were_loaded_otherwise_are_not_compared(
    tmp_path: Path, services_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = count()
    monkeypatch.setattr(runner, "kernels_of", lambda *_, **__: f"kernels of load {next(loads)}")
    strict = ("equivalence", *SMALL, "--policies", "continuous", "--dtypes", "bfloat16")
    status, _, err = paceline_here(*strict, "--output", str(tmp_path))
    assert status == 1
    assert "the target under continuous was loaded with kernels of load" in err


def test_what_cannot_be_measured_is_said_in_one_line_before_anything_starts(
    tmp_path: Path, pairs: dict[str, PairOfCheckpoints]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x", "category": "qa"}')
    (tmp_path / "empty.jsonl").touch()
    file = str(tmp_path / "in.jsonl")
    for arguments, words in [
        (["bench", "--input", str(tmp_path / "missing")], "missing cannot be read"),
        (["equivalence", "--input", str(tmp_path / "empty.jsonl")], "empty.jsonl holds no lines"),
        (["bench", "--input", file, "--category", "art"], "'art' is not in"),
        (["bench", "--systems", "plain,heads"], "--systems has heads, and there are none; give --heads"),
        (["bench", "--systems", "hf,plain", "--gguf", file], "is for llama.cpp, which --systems hf,plain lacks"),
        (["bench", "--systems", "speculative,vllm"], "--systems has 'vllm'; give any of hf,"),
        (["bench", "--source-sets", "all,luck"], "--source-sets has 'luck'; give all, or any of draft, suffix,"),
        (["bench", "--by-category"], "--by-category needs lines with a `category`"),
        (["bench", "--batch-sizes", "1,0"], "--batch-sizes has '0'"),
        (["equivalence", "--output", file], "cannot be written"),
        (["equivalence", "--temperature", "1e-4"], "temperature is 0.0001; give 0, or"),
        (["bench", "--output", str(tmp_path), "--draft-model", "/nowhere"], "'/nowhere' is not a directory"),
        (["bench", "--output", str(tmp_path), "--draft-model", str(pairs["Llama"].draft)], "has no tokenizer"),
    ]:
        status, out, err = paceline_here(*arguments)
        assert (status, out) == (1, "")
        assert err.count("\n") == 1
        assert words in err


def test_half_a_surrogate_pair_in_a_prompt_is_named(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "cut off \\ud83d"}\n')
    status, _, err = paceline_here("equivalence", "--input", str(prompts), "--output", str(tmp_path / "out"))
    assert status == 1 and "--input" in err
