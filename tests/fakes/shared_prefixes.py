"""Targets that share equal beginnings, and conversations with them."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.types import ModelDescription, ModelIdentity, ProposeRow, VerifyRow
from tests.coordinators import Dispatched
from tests.fakes.dispatches import output, submit
from tests.fakes.model_services import VOCABULARY_SIZE, FakeVerifier

PAGE_TOKENS = 16


def sharing(model: ModelDescription, process_id: str, page_count: int, *, tells: bool = True) -> ModelDescription:
    """Return a model's description as of a process that shares beginnings."""
    cache = replace(model.cache, prefix_sharing=tells, capacity_bytes=page_count * PAGE_TOKENS)
    return replace(model, cache=cache, identity=ModelIdentity("digest", process_id))


class SharingVerifier(FakeVerifier):
    """Counts the prompt tokens that it would compute if it kept all pages.

    `tells` is whether it says that it shares: without that, a coordinator places by load alone.
    """

    def __init__(self, number: int = 0, *, tells: bool = True) -> None:
        super().__init__()
        self.description = sharing(self.description, f"process {number}", 10**6, tells=tells)
        self.computed_count = 0
        self.prompt_ids: dict[str, None] = {}
        """Sequences whose prompts came here, in their order."""
        self._pages: set[int] = set()

    def restart(self, process_id: str) -> None:
        self.evict()
        self._pages.clear()
        self.description = replace(self.description, identity=ModelIdentity("digest", process_id))

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
        self._pages.add(key)
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
    """Loads of targets, looked at whenever a request is sent, and what was passed over by the time it was answered."""

    def __init__(self) -> None:
        self.most_passed = 0
        self._sums: Counter[str] = Counter()

    def look(self, running: Dispatched) -> None:
        self._sums.update({one.address: one.sequence_count for one in running.dispatcher.describe()})

    @property
    def unevenness(self) -> float:
        """Highest mean load as a multiple of the mean of all."""
        return max(self._sums.values()) * len(self._sums) / self._sums.total()


async def converse(coordinators: Sequence[Dispatched], talk: Talk) -> LoadSeen:
    """Hold the conversations, each turn with any of the coordinators."""
    seen, system = LoadSeen(), words(random.Random(1), talk.system_tokens)
    places = asyncio.Semaphore(talk.together)

    async def conversation(number: int) -> None:
        own = random.Random(f"1 {number}")
        said = system
        async with places:
            for _ in range(talk.turn_count):
                said += words(own, own.randrange(talk.turn_tokens // 2, 2 * talk.turn_tokens))
                running = own.choice(coordinators)
                request = submit(running, said, talk.answer_tokens)
                seen.look(running)
                said += tuple(await output(request))
                seen.most_passed = max(seen.most_passed, request.passed_count)
                for _ in range(own.randrange(20)):
                    await asyncio.sleep(0)

    await asyncio.gather(*map(conversation, range(talk.conversation_count)))
    return seen


def words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(4, VOCABULARY_SIZE) for _ in range(count))
