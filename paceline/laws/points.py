"""Measured points: drafts that were trained, and how often they were right."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from paceline.errors import StartupError
from paceline.files import replace_file


@dataclass(frozen=True)
class Point:
    """One draft."""

    depth: int
    """Layers."""
    token_count: int
    """Tokens that it was trained on."""
    acceptance: float
    """Share of right drafts among those compared, from 0 to 1."""
    train_s: float | None = None
    """Seconds of its training; None if unknown."""
    step_s: float | None = None
    """Seconds of one step of drafting; None if unknown."""
    held_out: bool = False
    """Whether laws are compared with it instead of fitted to it."""


_FORM = TypeAdapter(list[Point])


def write_points(path: Path, points: list[Point]) -> None:
    replace_file(path, _FORM.dump_json(points, indent=2).decode() + "\n")


def read_points(path: Path) -> list[Point]:
    """Raise StartupError where the file has no points, or impossible ones."""
    try:
        points = _FORM.validate_json(path.read_bytes())
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}; name a file of points") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise StartupError(
            f"{path} has no points: {place}: {first['msg']}; give a list of depth, token_count and acceptance"
        ) from error
    for number, one in enumerate(points):
        if one.depth < 1 or one.token_count < 1 or not 0 < one.acceptance < 1:
            raise StartupError(
                f"{path}: point {number} is {one}; give depth and token_count of at least 1, and an acceptance between "
                "0 and 1"
            )
        if not all(seconds is None or (isfinite(seconds) and seconds > 0) for seconds in (one.train_s, one.step_s)):
            raise StartupError(
                f"{path}: point {number} is {one}; give train_s and step_s above 0, or leave out what was not measured"
            )
    return points
