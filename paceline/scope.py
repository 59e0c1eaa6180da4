"""Callers of a model service, and scopes, which keep sequence ids apart: one id in two scopes names two sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.types import ProposeRow, VerifyRow

Weights = Mapping[str, float]
"""Shares of callers, by names of their certificates; others have 1."""
EQUAL: Weights = {}
LEAST_WEIGHT = 0.01
RowT = TypeVar("RowT", ProposeRow, VerifyRow)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who has a fair share of a model service: a connection, which a coordinator has one of."""

    name: str = ""
    """Tells it from others, those of its scope too."""
    scope: str = ""
    """Prefix that sets its sequences apart; from `security.access.caller_scope`, empty for none."""
    weight: float = 1.0
    """Its share, beside those of others."""


def parse_weights(setting: str) -> Weights:
    """Return the weights of names, from `NAME=WEIGHT` with commas between them. Raise ValueError."""
    weights: dict[str, float] = {}
    for word in filter(None, (one.strip() for one in setting.split(","))):
        name, _, value = word.rpartition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            weights[name] = 0.0
        if not name or not LEAST_WEIGHT <= weights[name] <= 1 / LEAST_WEIGHT:
            raise ValueError(
                f"{word!r} is no weight of a name; give NAME=WEIGHT with a weight from {LEAST_WEIGHT} to "
                f"{1 / LEAST_WEIGHT:.0f}, such as batch=1,chat=3"
            )
    return weights


def scope_of(sequence_id: str) -> str:
    """Return the scope of a cache's sequence id; with a `/` in the caller's own id, more than the scope."""
    return sequence_id.rpartition("/")[0]


def scoped(rows: Sequence[RowT], scope: str) -> Sequence[RowT]:
    """Return the rows with `scope` before their ids."""
    return [replace(row, sequence_id=scope + row.sequence_id) for row in rows] if scope else rows
