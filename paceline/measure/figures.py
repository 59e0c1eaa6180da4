"""The plotting library, which not every installation has."""

from typing import TYPE_CHECKING

from paceline.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width_inches: float, height_inches: float) -> "Figure":
    """Raises InvalidRequest when the library is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest("plots need matplotlib: pip install 'paceline[bench]'") from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def check_plots() -> None:
    """Raise InvalidRequest when plots cannot be drawn: better before a long run than after it."""
    new_figure(1, 1)
