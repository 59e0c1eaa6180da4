"""Callers of a model service, and scopes, which keep sequence ids apart: one id in two scopes names two sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.types import ProposeRow, VerifyRow

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


def scope_of(sequence_id: str) -> str:
    """Return the scope of a cache's sequence id; with a `/` in the caller's own id, more than the scope."""
    return sequence_id.rpartition("/")[0]


def scoped(rows: Sequence[RowT], scope: str) -> Sequence[RowT]:
    """Return the rows with `scope` before their ids."""
    return [replace(row, sequence_id=scope + row.sequence_id) for row in rows] if scope else rows
