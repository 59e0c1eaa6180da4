"""What the door costs beside gRPC: time to the first token, tokens a second, and many streams at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median

from benchmarks.door.http import HttpClient
from paceline.client import Client
from paceline.types import GenerationRequest, TokenIds

Prompts = Sequence[tuple[int, ...]]
OF_FIRST_TOKEN = 4
"""Tokens asked for where the first one is timed."""


async def first_token_ms(grpc: Client, http: HttpClient, prompt: tuple[int, ...], count: int) -> tuple[float, float]:
    """Return the median milliseconds to the first token by gRPC and by HTTP, sent one by one, in turn."""
    request = GenerationRequest(TokenIds(prompt), OF_FIRST_TOKEN)
    body = {"prompt": prompt, "max_tokens": OF_FIRST_TOKEN, "temperature": 0}
    by_grpc, by_http = [], []
    for _ in range(count):
        by_grpc.append(await _first_piece_s(grpc, request))
        answer = await http.stream(body)
        assert answer.first_token_s is not None
        by_http.append(answer.first_token_s)
    return 1e3 * median(by_grpc), 1e3 * median(by_http)


async def _first_piece_s(client: Client, request: GenerationRequest) -> float:
    began, first_s = time.perf_counter(), None
    async for piece in client.generate(request):
        if first_s is None and piece.tokens:
            first_s = time.perf_counter() - began
    assert first_s is not None
    return first_s


async def tokens_per_s(
    grpc: Client, http: HttpClient, prompts: Prompts, max_new_tokens: int, runs: int
) -> list[tuple[float, float]]:
    """Return tokens a second by gRPC and by HTTP of neighbouring runs; all prompts are sent at once."""

    async def by_grpc(prompt: tuple[int, ...]) -> int:
        count = 0
        async for piece in grpc.generate(GenerationRequest(TokenIds(prompt), max_new_tokens)):
            count += len(piece.tokens)
        return count

    async def by_http(prompt: tuple[int, ...]) -> int:
        body = {"prompt": prompt, "max_tokens": max_new_tokens, "temperature": 0}
        return len((await http.stream(body)).token_ids)

    await _rate(by_grpc, prompts)  # learns what drafts are worth
    await _rate(by_http, prompts)
    pairs = []
    for number in range(runs):
        order = (by_grpc, by_http) if number % 2 == 0 else (by_http, by_grpc)
        rates = {way: await _rate(way, prompts) for way in order}
        pairs.append((rates[by_grpc], rates[by_http]))
    return pairs


async def _rate(way: Callable[[tuple[int, ...]], Awaitable[int]], prompts: Prompts) -> float:
    began = time.perf_counter()
    counts = await asyncio.gather(*map(way, prompts))
    return sum(counts) / (time.perf_counter() - began)


async def streams_at_once(http: HttpClient, prompts: Prompts, max_new_tokens: int) -> tuple[int, float]:
    """Open a stream for each prompt at once; return how many had all their tokens, and tokens a second."""
    began = time.perf_counter()
    bodies = [{"prompt": one, "max_tokens": max_new_tokens, "temperature": 0} for one in prompts]
    answers = await asyncio.gather(*map(http.stream, bodies))
    elapsed_s = time.perf_counter() - began
    whole = sum(len(one.token_ids) == max_new_tokens for one in answers)
    return whole, sum(len(one.token_ids) for one in answers) / elapsed_s
