"""Sequence ids of one caller set apart from those of others: the same id of two callers is two sequences."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from paceline.types import ProposeRow, VerifyRow

RowT = TypeVar("RowT", ProposeRow, VerifyRow)


def scope_of(sequence_id: str) -> str:
    """The scope of an id as the cache names it; a part of the caller's own id may be taken for more of it."""
    return sequence_id.rpartition("/")[0]


def scoped(rows: Sequence[RowT], scope: str) -> Sequence[RowT]:
    """Return the rows as the cache names them; `scope` is `security.access.caller_scope`, empty for none."""
    return [replace(row, sequence_id=scope + row.sequence_id) for row in rows] if scope else rows
