"""Outputs of the same requests with drafts and without."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.door.http import Answer, HttpClient

PLAIN = {"paceline": {"max_draft_count": 0}}
AT_ONCE = 8
Body = Mapping[str, Any]


@dataclass(frozen=True)
class Pair:
    drafted: Answer
    """Streamed, with drafts."""
    plain: Answer
    """At once, by plain decoding."""

    @property
    def is_equal(self) -> bool:
        """Whether both have the same ids, and the same calls but for their own ids."""
        return self.drafted.token_ids == self.plain.token_ids and _calls(self.drafted) == _calls(self.plain)


async def drafted_and_plain(http: HttpClient, bodies: Sequence[Body], path: str) -> list[Pair]:
    """Send all bodies, first with drafts and then without, so many at once."""
    places = asyncio.Semaphore(AT_ONCE)

    async def drafted(body: Body) -> Answer:
        async with places:
            return await http.stream(body, path)

    async def plain(body: Body) -> Answer:
        async with places:
            return await http.complete({**body, **PLAIN}, path)

    ways = [await asyncio.gather(*map(way, bodies)) for way in (drafted, plain)]
    return [Pair(*outputs) for outputs in zip(*ways, strict=True)]


def _calls(answer: Answer) -> list[Any]:
    return [one["function"] for one in answer.tool_calls]
