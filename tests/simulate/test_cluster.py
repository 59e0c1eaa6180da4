"""What is sent to a simulated cluster, and the files of costs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import InvalidRequest, StartupError
from paceline.simulate.cluster import Lengths, PlannedRequest, poisson_requests, read_trace
from paceline.simulate.saved_costs import SavedCosts, read_costs, write_costs
from paceline.types import CacheDescription, ClusterDescription, ClusterStatistics, MeasuredCosts
from tests.fakes.model_services import describe
from tests.simulate.made_up_costs import saved_costs


def test_the_same_seed_plans_the_same_requests() -> None:
    lengths = Lengths.of("8:16"), Lengths.of("32")
    planned = poisson_requests(5.0, *lengths, 3, 50)
    assert planned == poisson_requests(5.0, *lengths, 3, 50) != poisson_requests(5.0, *lengths, 4, 50)
    assert {one.output_count for one in planned} == {32}
    assert all(8 <= one.prompt_count <= 16 for one in planned)


@pytest.mark.parametrize("text", ["", "x", "0", "5:", "9:3", "-1", "1:2:3", "1" * 5000])
def test_a_wrong_length_is_named_with_its_remedy(text: str) -> None:
    with pytest.raises(InvalidRequest, match="give"):
        Lengths.of(text)


def test_a_trace_is_read_in_the_order_of_its_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 2, "prompt_tokens": 5, "max_tokens": 6}\n\n'
        '{"arrival_s": 0.5, "prompt_tokens": 3, "max_tokens": 4, "user": "x"}\n'
    )
    assert read_trace(path) == [PlannedRequest(3, 4, 0.5), PlannedRequest(5, 6, 2.0)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nothing", ":1 is no request"),
        ("[1]", ":1 is no request"),
        ("[" * 100_000, ":1 is no request"),
        ('{"arrival_s": 1}', ":1 is no request"),
        ('{"arrival_s": -1, "prompt_tokens": 5, "max_tokens": 6}', "arrival_s is -1"),
        ('{"arrival_s": 1795711418.5, "prompt_tokens": 5, "max_tokens": 6}', "arrival_s is 1795711418.5"),
        ('{"arrival_s": 1e400, "prompt_tokens": 5, "max_tokens": 6}', "arrival_s is inf"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "max_tokens": 6}', "prompt_tokens is 0"),
        ('{"arrival_s": 1, "prompt_tokens": true, "max_tokens": 6}', "prompt_tokens is True"),
        (f'{{"arrival_s": 1, "prompt_tokens": 1{"0" * 4000}, "max_tokens": 6}}', "prompt_tokens is 1000"),
        ("", "has no requests"),
    ],
)
def test_a_wrong_trace_is_named_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(StartupError, match=words):
        read_trace(path)


def test_costs_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, saved_costs())
    assert read_costs(path) == saved_costs()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"target": 5}'])
def test_a_file_without_costs_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(StartupError, match="has no costs"):
        read_costs(path)


@pytest.mark.parametrize("field", ["call_count", "token_bytes"])
def test_a_number_that_no_cluster_measures_is_refused(field: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, saved_costs())
    path.write_text(re.sub(rf'"{field}": \d+', f'"{field}": 1{"0" * 400}', path.read_text()))
    with pytest.raises(StartupError, match="has no costs"):
        read_costs(path)


def test_costs_are_taken_from_a_cluster_that_measured_them() -> None:
    expected = saved_costs()
    target, draft = (
        replace(describe(one.model_id), cache=CacheDescription(token_bytes=one.token_bytes, prefill_chunk_tokens=64))
        for one in (expected.target, expected.draft)
        if one
    )
    cluster = ClusterDescription(target, draft, 8, 5, "continuous", 2, 0, 0, ClusterStatistics(), costs=expected.costs)
    named = replace(cluster, target=replace(target, model_id="target"), draft=replace(draft, model_id="draft"))
    assert SavedCosts.of(named) == expected
    with pytest.raises(InvalidRequest, match="older"):
        SavedCosts.of(replace(cluster, costs=None))
    with pytest.raises(InvalidRequest, match="no round yet"):
        SavedCosts.of(replace(cluster, costs=MeasuredCosts()))
