"""The random search: each finding is reported once, as a case to paste."""

import time
from itertools import count
from pathlib import Path

import pytest

from benchmarks.search import Search, pasteable

TESTS = """
from hypothesis import given, strategies as st

@given(number=st.integers(0, 99), word=st.sampled_from(["a", "b"]))
def test_wrong(number, word):
    assert number < 90

@given(st.booleans())
def test_right(flag):
    pass

def test_that_draws_nothing():
    assert False
"""


async def test_a_find_is_told_once_as_a_case_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    search = Search([str(tmp_path)], fuzz_inputs=0)
    await search.run(count(7), until_s=time.monotonic())
    assert search.pass_count == 2
    (find,) = search.finds
    assert find.test == "test_it.test_wrong"
    assert find.case.startswith("@example(\n    number=90,\n    word='a',\n)\n")
    assert "@reproduce_failure(" in find.case
    assert capsys.readouterr().out.count("@example(") == 1
    assert search.example_count > 20


async def test_tests_that_cannot_run_are_a_find(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import nothing_of_this_name")
    search = Search([str(tmp_path)], fuzz_inputs=0, processes=1)
    await search.run(count(7), until_s=time.monotonic())
    assert "nothing_of_this_name" in search.finds[0].case


def test_the_steps_of_a_state_machine_stay_as_they_are() -> None:
    text = "E   assert 20 < 20\nE   Failing test case: <state machine>\nE   state = M()\nE   state.add(n=2)\n"
    assert pasteable(text) == "<state machine>\nstate = M()\nstate.add(n=2)\n"
    assert pasteable("E   no example") == "E   no example"
