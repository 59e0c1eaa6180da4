"""Targets that share equal beginnings, and conversations with them."""

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from paceline.types import ModelIdentity, ProposeRow, VerifyRow
from tests.coordinators import Dispatched, dispatching
from tests.fakes.dispatches import SteppedVerifier, output, submit
from tests.fakes.model_services import VOCABULARY_SIZE

PAGE_TOKENS = 16


class SharingVerifier(SteppedVerifier):
    """Counts the prompt tokens that it would compute if it kept the latest `page_count` pages, sequences' own included.

    `tells` is whether it says that it shares: without that, a coordinator places by load alone.
    """

    def __init__(self, number: int = 0, *, page_count: int = 10**6, tells: bool = True) -> None:
        super().__init__()
        capacity = page_count * PAGE_TOKENS
        cache = replace(self.description.cache, prefix_sharing=tells, capacity_bytes=capacity)
        self.description = replace(self.description, cache=cache, identity=ModelIdentity("digest", f"process {number}"))
        self.computed_count = 0
        self.prompt_ids: dict[str, None] = {}
        """Sequences whose prompts came here, in their order."""
        self._page_count = page_count
        self._pages: OrderedDict[int, None] = OrderedDict()

    def append(self, row: ProposeRow | VerifyRow, token_ids: Sequence[int]) -> list[int]:
        prefix = super().append(row, token_ids)
        is_new = [not self._keep(prefix[:stop]) for stop in range(PAGE_TOKENS, len(prefix) + 1, PAGE_TOKENS)]
        if len(row.token_ids) > 1:
            self.prompt_ids[row.sequence_id] = None
            self.computed_count += PAGE_TOKENS * sum(is_new[row.base_length // PAGE_TOKENS :])
        return prefix

    def _keep(self, prefix: Sequence[int]) -> bool:
        """Keep the last page of a prefix; return whether it was there."""
        key = hash(tuple(prefix))
        was_there = key in self._pages
        self._pages[key] = None
        self._pages.move_to_end(key)
        if len(self._pages) > self._page_count:
            self._pages.popitem(last=False)
        return was_there


@dataclass(frozen=True)
class Talk:
    """Conversations, each of which asks again when it was answered, with all that was said before."""

    conversation_count: int
    turn_count: int
    system_tokens: int
    """Tokens of the beginning that all share."""
    turn_tokens: int = 24
    answer_tokens: int = 12
    together: int = 24
    """Conversations at once."""


class LoadSeen:
    """Mean loads of targets, looked at whenever a request is sent."""

    def __init__(self, target_count: int) -> None:
        self.sums = [0] * target_count
        self.looks = 0
        self.highest = 0.0

    def look(self, running: Dispatched) -> None:
        counts = [one.sequence_count for one in running.dispatcher.describe()]
        self.sums = [sum(pair) for pair in zip(self.sums, counts, strict=True)]
        self.looks += 1

    @property
    def unevenness(self) -> float:
        """Highest mean load as a multiple of the mean of all."""
        return max(self.sums) * len(self.sums) / sum(self.sums)


async def converse(coordinators: Sequence[Dispatched], talk: Talk, seen: LoadSeen, seed: int = 1) -> None:
    rng = random.Random(seed)
    system = _words(rng, talk.system_tokens)
    places = asyncio.Semaphore(talk.together)

    async def conversation(number: int) -> None:
        own = random.Random(f"{seed} {number}")
        said = system
        async with places:
            for _ in range(talk.turn_count):
                said += _words(own, own.randrange(talk.turn_tokens // 2, 2 * talk.turn_tokens))
                running = own.choice(coordinators)
                request = submit(running, said, talk.answer_tokens)
                seen.look(running)
                said += tuple(await output(request))
                for _ in range(own.randrange(20)):
                    await asyncio.sleep(0)

    await asyncio.gather(*map(conversation, range(talk.conversation_count)))


def _words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(4, VOCABULARY_SIZE) for _ in range(count))
