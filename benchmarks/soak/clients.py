"""Clients that send requests all the time and read them whole, cut short, in two parts, or with a pause."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from benchmarks.soak.requests import Asked
from paceline.client import Client
from paceline.errors import CallTimedOut, PacelineError, PeerUnavailable
from paceline.types import GenerationRequest, ReceivedOutput

PATIENCE_S = 600.0
"""Longest time of a request; a slower one counts as failed."""
MAX_SHORT_S = 2.0
"""Longest of the short deadlines, at which a client keeps what has come so far."""
MAX_READING_PAUSE_S = 3.0
"""Longest pause of a client that stops reading for a while."""
WEIGHTS = (5, 1, 1, 2, 1)
"""Relative frequency of each way of asking."""

Outputs = dict[int, list[int]]
"""Token ids by completion."""


@dataclass(frozen=True)
class Failure:
    asked: str
    reason: str
    message: str
    began_s: float
    ended_s: float
    """Both times are on the soak's clock."""


@dataclass
class Tally:
    """Outcomes of the requests so far."""

    ended: Counter[str] = field(default_factory=Counter)
    """Requests with right outputs, by way of asking."""
    kinds: Counter[str] = field(default_factory=Counter)
    token_count: int = 0
    """Number of tokens compared with the reference."""
    failures: list[Failure] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    @property
    def request_count(self) -> int:
        return sum(self.ended.values()) + len(self.failures) + len(self.mismatches)


class Soaker:
    """Sends requests that have a reference, in all ways of asking, and compares."""

    def __init__(self, client: Client, asked: Sequence[Asked], *, seed: int, began_s: float) -> None:
        self.tally = Tally()
        self._client = client
        self._asked = tuple(asked)
        self._rng = random.Random(seed)
        self._began_s = began_s

    async def run(self, client_count: int, until: asyncio.Event) -> None:
        """Keep `client_count` requests in flight until the event; then let the last ones end."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(client_count):
                clients.create_task(self._ask_on(until))

    async def _ask_on(self, until: asyncio.Event) -> None:
        while not until.is_set():
            asked = self._rng.choice(self._asked)
            ways = {
                "to the end": self._whole,
                "cancelled": self._cancelled,
                "deadline": self._deadline,
                "in two parts": self._in_two_parts,
                "with a pause": self._with_pause,
            }
            way = self._rng.choices(list(ways), WEIGHTS)[0]
            began_s = time.perf_counter() - self._began_s
            try:
                outputs = await ways[way](asked)
            except PacelineError as error:
                self._failed(asked, error, began_s)
            else:
                self._compare(asked, way, outputs)

    async def _whole(self, asked: Asked) -> Outputs:
        return await self._read(asked.request)

    async def _cancelled(self, asked: Asked) -> Outputs:
        return await self._read(asked.request, token_limit=self._rng.randint(1, 12))

    async def _deadline(self, asked: Asked) -> Outputs:
        return await self._read(asked.request, timeout_s=self._rng.uniform(0.05, MAX_SHORT_S))

    async def _in_two_parts(self, asked: Asked) -> Outputs:
        first = await self._cancelled(asked)
        received = tuple(ReceivedOutput(index, tuple(token_ids)) for index, token_ids in first.items())
        rest = await self._read(replace(asked.request, received_outputs=received, seed=asked.request.seed or 0))
        return {index: first.get(index, []) + rest.get(index, []) for index in first | rest}

    async def _with_pause(self, asked: Asked) -> Outputs:
        return await self._read(asked.request, pause_s=self._rng.uniform(0, MAX_READING_PAUSE_S))

    async def _read(
        self,
        request: GenerationRequest,
        *,
        token_limit: int | None = None,
        timeout_s: float | None = None,
        pause_s: float = 0.0,
    ) -> Outputs:
        """Return token ids by completion: all, or those that came before the limit."""
        outputs: Outputs = {}
        try:
            async with aclosing(self._client.generate(request, timeout_s=timeout_s or PATIENCE_S)) as pieces:
                async for piece in pieces:
                    outputs.setdefault(piece.completion_index, []).extend(one.token_id for one in piece.tokens)
                    if token_limit is not None and sum(map(len, outputs.values())) >= token_limit:
                        break
                    await asyncio.sleep(pause_s)
                    pause_s = 0.0
        except (CallTimedOut, PeerUnavailable):
            if timeout_s is None:
                raise
        return outputs

    def _compare(self, asked: Asked, way: str, outputs: Outputs) -> None:
        whole = way in ("to the end", "in two parts", "with a pause")
        for index, expected in enumerate(asked.outputs):
            tokens = outputs.get(index, [])
            if list(expected if whole else expected[: len(tokens)]) != tokens:
                self.tally.mismatches.append(f"{asked.kind}, {way}, output {index}: {tokens}, not {expected}")
                return
        self.tally.ended[way] += 1
        self.tally.kinds[asked.kind] += 1
        self.tally.token_count += sum(map(len, outputs.values()))

    def _failed(self, asked: Asked, error: PacelineError, began_s: float) -> None:
        ended_s = time.perf_counter() - self._began_s
        self.tally.failures.append(Failure(asked.kind, error.reason, error.message, began_s, ended_s))
