"""Access to the plotting library, which some installations lack."""

from typing import TYPE_CHECKING

from paceline.extras import named_extras

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width_inches: float, height_inches: float) -> "Figure":
    """Make a figure. Raise StartupError when the library is missing."""
    with named_extras():
        from matplotlib.figure import Figure
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def check_plots() -> None:
    """Raise StartupError when plots cannot be drawn; to be called before a long run."""
    new_figure(1, 1)
