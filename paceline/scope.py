"""Scopes that keep the sequence ids of callers apart: the same id from two callers names two sequences."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from paceline.types import ProposeRow, VerifyRow

RowT = TypeVar("RowT", ProposeRow, VerifyRow)


def scope_of(sequence_id: str) -> str:
    """Return the scope of a cache's sequence id; with a `/` in the caller's own id, more than the scope."""
    return sequence_id.rpartition("/")[0]


def scoped(rows: Sequence[RowT], scope: str) -> Sequence[RowT]:
    """Return the rows with `scope` before their ids; `scope` is from `security.access.caller_scope`, empty for none."""
    return [replace(row, sequence_id=scope + row.sequence_id) for row in rows] if scope else rows
