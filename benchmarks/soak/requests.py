"""The requests, and their right outputs: undisturbed plain decoding of the same request."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.cli.prompts import PROMPTS
from paceline.client import Client
from paceline.types import GenerationRequest, SamplingParameters, Text, UserMessage

SAMPLED = (
    SamplingParameters(temperature=0.8, top_p=0.95),
    SamplingParameters(temperature=1.1, top_k=40, presence_penalty=0.3),
    SamplingParameters(temperature=0.6, repetition_penalty=1.1, min_new_tokens=8),
)
REFERENCES_AT_ONCE = 8


@dataclass(frozen=True)
class Asked:
    """A request and its right outputs: token ids by completion."""

    kind: str
    request: GenerationRequest
    outputs: tuple[tuple[int, ...], ...]


def make_requests(count: int, seed: int) -> list[tuple[str, GenerationRequest]]:
    """Draw requests of every kind in turn: greedy, sampled, several outputs, long, stopped by a string, plain."""
    rng = random.Random(seed)
    makers = (_greedy, _sampled, _several, _long, _stopped, _plain)
    return [makers[number % len(makers)](rng) for number in range(count)]


def _message(rng: random.Random) -> UserMessage:
    return UserMessage(rng.choice(PROMPTS))


def _greedy(rng: random.Random) -> tuple[str, GenerationRequest]:
    return "greedy", GenerationRequest(_message(rng), max_new_tokens=rng.randint(20, 120))


def _sampled(rng: random.Random) -> tuple[str, GenerationRequest]:
    request = GenerationRequest(_message(rng), rng.randint(20, 80), sampling=rng.choice(SAMPLED))
    return "sampled", replace(request, seed=rng.getrandbits(64))


def _several(rng: random.Random) -> tuple[str, GenerationRequest]:
    request = GenerationRequest(_message(rng), rng.randint(10, 50), sampling=SAMPLED[0], seed=rng.getrandbits(64))
    return "several outputs", replace(request, completion_count=3)


def _long(rng: random.Random) -> tuple[str, GenerationRequest]:
    return "long prompt", GenerationRequest(Text(" ".join(rng.sample(PROMPTS, 12))), rng.randint(10, 40))


def _stopped(rng: random.Random) -> tuple[str, GenerationRequest]:
    return "stop string", GenerationRequest(_message(rng), 100, stop_strings=("Answer", "]\n"))


def _plain(rng: random.Random) -> tuple[str, GenerationRequest]:
    return "plain", GenerationRequest(_message(rng), rng.randint(10, 60), max_draft_count=0)


async def with_references(client: Client, requests: Sequence[tuple[str, GenerationRequest]]) -> list[Asked]:
    """Return the requests with the outputs of one plain decoding."""
    places = asyncio.Semaphore(REFERENCES_AT_ONCE)

    async def ask(kind: str, request: GenerationRequest) -> Asked:
        async with places:
            completions = await client.complete_all(replace(request, max_draft_count=0))
        return Asked(kind, request, tuple(tuple(one.token_ids) for one in completions))

    return list(await asyncio.gather(*(ask(kind, request) for kind, request in requests)))
