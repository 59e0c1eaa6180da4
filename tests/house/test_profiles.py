"""The tests draw the same examples in every run."""

import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn_integers() -> list[int]:
    found = []

    @given(st.integers())
    def draw(number: int) -> None:
        found.append(number)

    draw()
    return found


def module_of_constants(path: Path) -> ModuleType:
    path.write_text("\n".join(f"c{number} = {number}" for number in range(10**6, 10**6 + 1000)))
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    return module


@pytest.mark.review
def test_every_run_draws_the_same_examples_and_looks_at_no_clock() -> None:
    """Review A1: hypothesis' random examples failed a newcomer's run."""
    used = settings()
    assert (used.derandomize, used.database, used.deadline) == (True, None, None)
    assert drawn_integers() == drawn_integers()


@pytest.mark.review
def test_what_is_drawn_does_not_depend_on_the_modules_that_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review A1: hypothesis draws constants of the project's modules that happen to be loaded."""
    before = drawn_integers()
    monkeypatch.setitem(sys.modules, "constants", module_of_constants(tmp_path / "constants.py"))
    assert drawn_integers() == before


@pytest.mark.parametrize("time", [1, 2])
def test_random_numbers_are_the_same_in_every_test(time: int) -> None:
    assert random.random() == random.Random(0).random()
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0))
