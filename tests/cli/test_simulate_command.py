"""`paceline simulate` on costs from a file."""

import json
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


@pytest.mark.parametrize("flags", [("--rate", "1e-9"), ("--clients", "1", "--target-round-trip-ms", "inf")])
def test_a_simulation_without_an_end_is_refused(costs: str, flags: tuple[str, ...]) -> None:
    status, _, err = paceline_here("simulate", "--costs", costs, "--requests", "4", *flags)
    assert status != 0 and flags[-2] in err
