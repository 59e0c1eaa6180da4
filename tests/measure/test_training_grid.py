"""The grid of drafts: which cells it has, and which are held out."""

import pytest

from paceline.errors import InvalidRequest
from training.grid import Cell, cells, cells_named


def test_the_cheapest_cells_come_first() -> None:
    assert cells((1, 3), (100, 200)) == [Cell(1, 100), Cell(1, 200), Cell(3, 100), Cell(3, 200)]


def test_cells_are_named_by_depth_and_tokens() -> None:
    assert cells_named("3:2000,2:4000") == {Cell(3, 2000), Cell(2, 4000)}
    assert not cells_named("")


@pytest.mark.parametrize("names", ["3", "3:", ":100", "3:1e6", "1:2,x"])
def test_what_is_no_cell_is_refused(names: str) -> None:
    with pytest.raises(InvalidRequest, match="DEPTH:TOKENS"):
        cells_named(names)
