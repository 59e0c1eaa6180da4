"""Generations without admission, for tests of what is done with them."""

from collections.abc import Sequence
from typing import Any

from coordinator.requests.generation import Generation, Request
from coordinator.requests.output import Output, StopRules
from paceline.types import Usage


def generation_of(
    token_ids: Sequence[int] = (5, 6, 7),
    max_new_tokens: int = 40,
    name: str = "one",
    *,
    end_token_ids: frozenset[int] = frozenset(),
    request: Request | None = None,
    **more: Any,
) -> Generation:
    """Return a generation of a prompt, whose output has no text; `more` are other fields of it."""
    output = Output(StopRules(max_new_tokens, end_token_ids), None)
    return Generation(name, list(token_ids), output, 64, Usage(len(token_ids)), request or Request(), **more)
