"""The grid of drafts: which cells it has, and which are held out."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.builtin import resolve_model
from paceline.errors import InvalidRequest
from paceline.laws.points import Point, write_points
from training import grid
from training.__main__ import app
from training.grid import Cell, Recipe, cells, cells_named, made_points
from training.outputs import Output, write_outputs


def test_the_cheapest_cells_come_first() -> None:
    assert cells((1, 3), (100, 200)) == [Cell(1, 100), Cell(1, 200), Cell(3, 100), Cell(3, 200)]


def test_cells_are_named_by_depth_and_tokens() -> None:
    assert cells_named("3:2000,2:4000") == {Cell(3, 2000), Cell(2, 4000)}
    assert not cells_named("")


@pytest.mark.parametrize("names", ["3", "3:", ":100", "3:1e6", "1:2,x"])
def test_what_is_no_cell_is_refused(names: str) -> None:
    with pytest.raises(InvalidRequest, match="DEPTH:TOKENS"):
        cells_named(names)


def no_recipe() -> Recipe:
    raise AssertionError("every cell is there")


def test_what_is_held_out_is_what_the_last_call_says_and_cells_stay(tmp_path: Path) -> None:
    wanted = cells((1, 2), (100,))
    for one in wanted:
        write_points(one.point_file(tmp_path), [Point(one.depth, 120, 0.5, held_out=one.depth == 1)])
    for held_out in (frozenset({Cell(2, 100)}), frozenset[Cell]()):
        found = made_points(tmp_path, wanted, held_out, no_recipe)
        assert [Cell(one.depth, 100) for one in found if one.held_out] == list(held_out)


def test_no_draft_learns_a_prompt_on_whose_outputs_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come several times among outputs, and a file of lessons may be from a call with another seed."""
    made: list[Recipe] = []

    def kept(folder: Path, wanted: object, held_out: object, recipe: Callable[[], Recipe]) -> list[Point]:
        made.append(recipe())
        return []

    monkeypatch.setattr(grid, "made_points", kept)
    outputs, lessons = tmp_path / "outputs.json", tmp_path / "lessons.safetensors"
    write_outputs(outputs, [Output((10, 20 + number % 20, 30, 31), 2) for number in range(60)])
    flags = ["--outputs", str(outputs), "--lessons", str(lessons), "--folder", str(tmp_path / "grid")]
    for seed in "12":
        result = CliRunner().invoke(
            app, ["grid", "--target", str(resolve_model("builtin:target")), "--seed", seed, *flags]
        )
        assert result.exit_code == 0, result.output
    assert {one.prompt for one in made[0].held} != {one.prompt for one in made[1].held}
    for one in made:
        assert one.lessons and not {lesson.output.prompt for lesson in one.lessons} & {held.prompt for held in one.held}
