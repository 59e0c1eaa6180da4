"""Common steps of tests with several targets: ask, wait, compare."""

from functools import partial
from typing import Any

from coordinator.requests.generation import Request
from paceline.types import GenerationRequest, TokenIds
from tests import waits
from tests.coordinators import Dispatched
from tests.fakes.model_services import continuation

PROMPTS = [(number, number) for number in range(4, 12)]
LENGTH = 30
EXPECTED = [continuation(prompt, LENGTH) for prompt in PROMPTS]
"""The target's own outputs for the prompts, up to their end tokens."""


def submit(
    running: Dispatched, prompt: tuple[int, ...], count: int = 30, deadline_s: float | None = None, **wishes: Any
) -> Request:
    asked = GenerationRequest(TokenIds(prompt), count, ignore_end_tokens=True, **wishes)
    request = running.admission.admit(asked)
    request.deadline_s = deadline_s
    running.dispatcher.submit(request)
    return request


until = partial(waits.until, pause_s=0.0)
"""Looks at every turn of the loop: between fakes a round takes few of them."""


async def output(request: Request) -> list[int]:
    return [token.token_id async for piece in request.stream.pieces() for token in piece.tokens]


def whole(prompt: tuple[int, ...], count: int = 30, language: int = 17) -> list[int]:
    """Return the target's own output, past its end tokens."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + count:
        token_ids += continuation(token_ids, 1, language)
    return token_ids[len(prompt) :]
