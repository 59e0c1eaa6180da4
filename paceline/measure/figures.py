"""Access to the plotting library, which some installations lack."""

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.extras import named_extras
from paceline.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 160


def new_figure(width_inches: float, height_inches: float) -> "Figure":
    """Make a figure. Raise StartupError when the library is missing."""
    with named_extras():
        from matplotlib.figure import Figure
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure as SVG if the path ends so, else as PNG: whole, or not at all."""
    form = "svg" if path.suffix == ".svg" else "png"
    with replacing(path) as beside:
        figure.savefig(beside, format=form, dpi=DPI)


def check_plots() -> None:
    """Raise StartupError when plots cannot be drawn; to be called before a long run."""
    new_figure(1, 1)
