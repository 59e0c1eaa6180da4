"""`paceline simulate` on costs from a file."""

import json
import math
from pathlib import Path

import pytest

from paceline.simulate.saved_costs import write_costs
from tests.commands import paceline_here
from tests.simulate.made_up_costs import saved_costs


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    write_costs(path, saved_costs())
    return str(path)


def test_a_simulation_is_printed_and_written(costs: str, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    flags = ("--clients", "4", "--requests", "6", "--max-tokens", "8:12", "--targets", "2", "--output", str(output))
    status, out, err = paceline_here("simulate", "--costs", costs, *flags)
    assert (status, err) == (0, "")
    assert "6 completed" in out and "target 2" in out
    written = json.loads(output.read_text())
    assert written["summary"]["counts"]["completed"] == 6
    assert written["settings"]["draft_count"] == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "no workload given"),
        (("--rate", "2", "--clients", "3"), "--rate and --clients given"),
        (("--rate", "0"), "--rate is 0"),
        (("--clients", "1", "--draft-count", "many"), "--draft-count is 'many'"),
    ],
)
def test_wrong_flags_are_named_with_their_remedy(costs: str, flags: tuple[str, ...], words: str) -> None:
    status, _, err = paceline_here("simulate", "--costs", costs, *flags)
    assert status == 1
    assert words in err and "give" in err


@pytest.mark.parametrize(
    ("name", "written"), [("--costs", "--output"), ("--trace", "--output"), ("--trace", "--save-costs")]
)
def test_what_a_simulation_reads_is_not_written_over(name: str, written: str, costs: str, tmp_path: Path) -> None:
    """Measured costs were gone, and the command said that all was well."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s":0,"prompt_tokens":4,"max_tokens":4}\n')
    path = costs if name == "--costs" else str(trace)
    before = Path(path).read_bytes()
    status, out, err = paceline_here("simulate", "--costs", costs, "--trace", str(trace), written, path)
    assert (status, out) == (1, "")
    assert f"{written} {path} is the same file as {name} {path}" in err
    assert Path(path).read_bytes() == before


def test_costs_and_the_result_are_written_to_two_files(costs: str, tmp_path: Path) -> None:
    both = str(tmp_path / "both.json")
    status, out, err = paceline_here(
        "simulate", "--costs", costs, "--clients", "1", "--save-costs", both, "--output", both
    )
    assert (status, out) == (1, "")
    assert f"--output {both} is the same file as --save-costs {both}" in err


def test_costs_come_from_one_place() -> None:
    status, _, err = paceline_here("simulate", "--clients", "1")
    assert status == 1
    assert "give --costs FILE, or the --address" in err


def test_a_trace_that_is_no_text_is_named(costs: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\xff\xfe")
    status, _, err = paceline_here("simulate", "--costs", costs, "--trace", str(trace))
    assert status == 1 and "cannot be read" in err


def test_a_trace_may_begin_with_a_mark_of_byte_order(costs: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b'\xef\xbb\xbf{"arrival_s":0,"prompt_tokens":4,"max_tokens":4}\n')
    status, out, _ = paceline_here("simulate", "--costs", costs, "--trace", str(trace))
    assert status == 0 and "1 completed" in out


def test_a_line_of_a_trace_may_hold_any_character(costs: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s":0,"prompt_tokens":4,"max_tokens":4,"prompt":"a\u2028b"}\n', encoding="utf-8")
    status, out, _ = paceline_here("simulate", "--costs", costs, "--trace", str(trace))
    assert status == 0 and "1 completed" in out


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("batch_size",), 0, "batch_size"),
        (("draft_count",), 65, "draft_count"),
        (("costs", "calls"), [], "no calls to a target"),
        (("costs", "calls", 0, "call_count"), 0, "calls are counted from 1"),
        (("costs", "calls", 0, "executed_s"), -1.0, "seconds are finite, and not below 0"),
        (("costs", "calls", 0, "wire_s"), math.nan, "seconds are finite, and not below 0"),
        (("costs", "acceptances", 0, "compared_counts"), [100], "each place is compared"),
        (("costs", "acceptances", 0, "compared_counts"), [0] * 8, "each place is compared"),
    ],
)
def test_costs_that_no_cluster_measures_are_refused(
    costs: str, place: tuple[str | int, ...], value: object, words: str
) -> None:
    """They ended the command by a traceback, or gave a result that meant nothing."""
    written = told = json.loads(Path(costs).read_text())
    for one in place[:-1]:
        told = told[one]
    told[place[-1]] = value
    Path(costs).write_text(json.dumps(written))
    status, _, err = paceline_here("simulate", "--costs", costs, "--clients", "1")
    assert status == 1
    assert words in err and "give what --save-costs wrote" in err


@pytest.mark.parametrize("flags", [("--rate", "1e-9"), ("--clients", "1", "--target-round-trip-ms", "inf")])
def test_a_simulation_without_an_end_is_refused(costs: str, flags: tuple[str, ...]) -> None:
    status, _, err = paceline_here("simulate", "--costs", costs, "--requests", "4", *flags)
    assert status != 0 and flags[-2] in err
