"""Running the requests of one call, side by side, until all outputs are there or the client has gone."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

from paceline.client import NO_HEADERS, OnAccepted, named_time
from paceline.tasks import side_by_side
from paceline.types import ClusterDescription, GenerationAccepted, GenerationRequest, OutputPiece

Deliver = Callable[[int, OutputPiece], Awaitable[None]]
"""Takes the index of a prompt and a piece of one of its outputs. The next piece is read when it has returned."""
Accept = Callable[[int, GenerationAccepted], None]
MOST_OUTPUTS = 256
"""Outputs of one call that are under way at once. All at once, those of many prompts fit in no coordinator's queue."""


class Generator(Protocol):
    """What the gateway asks of coordinators; `paceline.client.Client` is one."""

    def generate(
        self,
        request: GenerationRequest,
        *,
        timeout_s: float | None = None,
        on_accepted: OnAccepted | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> AsyncGenerator[OutputPiece, None]: ...

    async def describe_once(self) -> ClusterDescription: ...


async def generate_all(
    generator: Generator,
    requests: Sequence[GenerationRequest],
    deliver: Deliver,
    accept: Accept,
    timeout_s: float,
    headers: Mapping[str, str] = NO_HEADERS,
) -> None:
    """Deliver all pieces. The first failure ends all requests, and is raised.

    All requests are for as many outputs. Those that wait for others to end have what is left of `timeout_s`.
    """
    clock = asyncio.get_running_loop().time
    ends_at_s = clock() + timeout_s
    window = asyncio.Semaphore(max(1, MOST_OUTPUTS // requests[0].completion_count))

    async def generate(index: int, request: GenerationRequest) -> None:
        async with window:
            pieces = generator.generate(
                request,
                timeout_s=max(0.0, ends_at_s - clock()),
                on_accepted=lambda one: accept(index, one),
                headers=headers,
            )
            async with aclosing(pieces):
                async for piece in pieces:
                    await deliver(index, piece)

    with named_time(timeout_s):
        if len(requests) == 1:
            await generate(0, requests[0])
            return
        async with side_by_side() as together:
            for index, request in enumerate(requests):
                together.create_task(generate(index, request))


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, and cancel it when the client goes away. Return whether it was done. The body must be read."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def bounded(send: Send, ends_at_s: float) -> Send:
    """Return a `send` that raises ClientDisconnect where the client has not read enough for it by a time of the loop.

    A server makes a sender wait until then, and for ever if the client never reads.
    """

    async def send_in_time(message: Message) -> None:
        try:
            async with asyncio.timeout_at(ends_at_s):
                await send(message)
        except TimeoutError:
            raise ClientDisconnect from None

    return send_in_time


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
