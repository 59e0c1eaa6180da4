"""Measured points: drafts that were trained, and how often they were right."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from paceline.errors import StartupError
from paceline.files import replace_file

MOST_LAYERS, MOST_TOKENS, MOST_S = 1_000_000, 10**18, 1e12
"""More than any draft has, is trained on or takes: with such numbers laws reckon without an overflow."""


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
        known = 1 <= one.depth <= MOST_LAYERS and 1 <= one.token_count <= MOST_TOKENS
        if not known or not 0 <= one.acceptance <= 1:
            raise StartupError(
                f"{path}: point {number} is {one}; give a depth of 1 to {MOST_LAYERS}, a token_count of 1 to "
                f"{MOST_TOKENS}, and an acceptance of 0 to 1"
            )
        if not all(seconds is None or 1 / MOST_S <= seconds <= MOST_S for seconds in (one.train_s, one.step_s)):
            raise StartupError(
                f"{path}: point {number} is {one}; give train_s and step_s of {1 / MOST_S} to {MOST_S} s, or leave out "
                "what was not measured"
            )
    return points
