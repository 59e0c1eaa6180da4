"""The model behind the coordinators: its name, and whether one serves the gateway. They are asked again and again."""

import asyncio
from typing import NoReturn

import structlog

from paceline.errors import (
    MethodNotFound,
    NotDescribed,
    PacelineError,
    PeerUnavailable,
    PermissionDenied,
    Unauthenticated,
)
from paceline.gateway.errors import HttpError
from paceline.gateway.generating import Generator

log = structlog.get_logger()
INTERVAL_S = 2.0
UNSERVED = (PeerUnavailable, Unauthenticated, PermissionDenied, MethodNotFound)
"""Errors that every request would get too: nobody is there, does not let the gateway in, or is another service."""


class ServedModel:
    def __init__(self, generator: Generator, names: tuple[str, ...]) -> None:
        """`names` are those that requests may give; empty: the target's own."""
        self._generator = generator
        self._names = names
        self._own_name = ""
        self.max_length: int | None = None
        """Most tokens of a prompt with its output; None when none is known."""
        self.is_served = True
        """Whether a coordinator answers, and takes the gateway's token and certificate."""

    async def watch(self) -> NoReturn:
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        try:
            target = (await self._generator.describe_once()).target
            self._own_name, self.max_length = target.model_id, target.longest_sequence
        except PacelineError as error:
            # One that describes nothing to callers answers them all the same.
            if isinstance(error, UNSERVED) and not isinstance(error, NotDescribed):
                if self.is_served:
                    log.warning("no coordinator serves the gateway", error=str(error))
                self.is_served = False
                return
        if not self.is_served:
            log.info("a coordinator serves the gateway again")
        self.is_served = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names to ask for; empty when none is known."""
        return self._names or ((self._own_name,) if self._own_name else ())

    def named(self, asked: str | None) -> str:
        """Return the name for an answer; empty: as its coordinator tells. Raise HttpError for an unknown name."""
        if not self.names:
            return asked or ""
        return self.shown(asked) if asked else self.names[0]

    def shown(self, name: str) -> str:
        """Return one of the names. Raise HttpError for any other."""
        if name in self.names:
            return name
        known = ", ".join(self.names) or "one when a coordinator has told it"
        words = f"model {name!r} is not served; ask for {known}, or leave it out"
        raise HttpError(404, words, param="model", code="model_not_found")
