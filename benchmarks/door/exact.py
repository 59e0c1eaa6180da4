"""Whether the same ids come by HTTP, streamed or not, by gRPC, and from Hugging Face."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.door.http import HttpClient
from paceline.client import Client
from paceline.types import GenerationRequest, SamplingParameters, TokenIds

Prompts = Sequence[tuple[int, ...]]
Outputs = list[list[int]]
SEED = 7


@dataclass(frozen=True)
class WaysIn:
    """Outputs of the same requests by each way."""

    grpc: Outputs
    http: Outputs
    streamed: Outputs


async def outputs_by_way(
    grpc: Client, http: HttpClient, prompts: Prompts, max_new_tokens: int, temperature: float
) -> WaysIn:
    """Send every prompt three times, each way after the other."""

    async def by_grpc(prompt: tuple[int, ...]) -> list[int]:
        sampling = SamplingParameters(temperature=temperature)
        request = GenerationRequest(TokenIds(prompt), max_new_tokens, sampling=sampling, seed=SEED)
        return (await grpc.complete(request)).token_ids

    def body(prompt: tuple[int, ...]) -> dict[str, object]:
        return {"prompt": prompt, "max_tokens": max_new_tokens, "temperature": temperature, "seed": SEED}

    async def by_http(prompt: tuple[int, ...]) -> list[int]:
        return (await http.complete(body(prompt))).token_ids

    async def streamed(prompt: tuple[int, ...]) -> list[int]:
        return (await http.stream(body(prompt))).token_ids

    ways = [await asyncio.gather(*map(way, prompts)) for way in (by_grpc, by_http, streamed)]
    return WaysIn(*ways)


def equal_count(outputs: Outputs, others: Outputs) -> int:
    return sum(one == other for one, other in zip(outputs, others, strict=True))
