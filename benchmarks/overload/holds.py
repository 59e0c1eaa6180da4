"""The longest hold of the coordinator's event loop by one client's requests: `python -m benchmarks.overload.holds`.

The coordinator is the real process; the models answer at once and repeat a prompt's last token. Each input is sent
three times, and the least hold counts, because a garbage collection or a page fault may come on top of one. Exit status
1 when an input always held the loop for more than 20 ms of its thread's processor time. That leaves out waits for
another thread, such as a parser that lets no other run: `coordinator/door/field_count.py` bounds those.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.instant_models import builtin_tokenizer, instant_models
from benchmarks.overload.watched_coordinator import METRIC, MODULE
from benchmarks.scrapes import scraped
from paceline.client import NO_RETRIES, Client
from paceline.errors import PacelineError
from paceline.process.service_process import running_service
from paceline.text import TextCodec
from paceline.types import GenerationRequest, SamplingParameters, Text, TokenIds
from paceline.v1 import common_pb2
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from paceline.wire import open_channel, translated_errors

LIMIT_S = 0.020
TIMES = 3
MAX_LENGTH = 2_000_000
MESSAGE_BYTES = 8_000_000
MILLION = 1_000_000

Ask = Callable[[Client, GenerationServiceStub], Awaitable[object]]


@dataclass(frozen=True)
class Hold:
    """Holds of the loop by one input, one for each time that it was sent, and the last outcome."""

    longest_s: tuple[float, ...]
    outcome: str

    @property
    def is_short(self) -> bool:
        return min(self.longest_s) <= LIMIT_S


def inputs() -> dict[str, Ask]:
    """Return the inputs by name."""
    codec = TextCodec(builtin_tokenizer())

    def spelled(token: str) -> int:
        token_id = codec.tokenizer.token_to_id(token)
        assert token_id is not None
        return token_id

    broken, word = spelled("Ģ"), spelled("a")  # the first is byte 0x80, which begins no character
    stops = tuple("a" * 63 + chr(ord("b") + number) for number in range(16))
    biased = GenerationRequest(TokenIds((word,)), 200, seed=1)
    biases = [
        SamplingParameters(temperature=1, logit_bias=tuple((token_id, bias / 64) for token_id in range(1024)))
        for bias in range(64)
    ]
    long_text = "hello world, 12 " * (MESSAGE_BYTES // 16)
    many = GenerationRequest(TokenIds((word,) * 100_000), 8, completion_count=64)
    return {
        "eight short prompts": together(GenerationRequest(TokenIds((word,) * 20), 500), 8),
        "tokens that complete no text": together(GenerationRequest(TokenIds((broken,)), 8000), 8),
        "the same in 64 outputs": together(GenerationRequest(TokenIds((broken,)), 500, completion_count=64), 1),
        "longest stop strings": together(GenerationRequest(TokenIds((word,)), 1000, stop_strings=stops), 8),
        "64 times 1,024 biases": each(replace(biased, sampling=sampling) for sampling in biases),
        "a million token ids": together(GenerationRequest(TokenIds((word,) * MILLION), 4), 1),
        "a million, the last one wrong": together(GenerationRequest(TokenIds((*(word,) * MILLION, MILLION)), 4), 1),
        "64 outputs of 100,000 token ids": together(many, 1),
        "a text of 8 MB": together(GenerationRequest(Text(long_text), 4), 1),
        "four million empty outputs received": raw(
            pb.GenerateTextRequest(received_outputs=[pb.ReceivedOutput()] * (MESSAGE_BYTES // 2))
        ),
        "four million empty stop strings": raw(pb.GenerateTextRequest(stop_strings=[""] * (MESSAGE_BYTES // 2))),
        "eight million token ids of a byte": raw(
            pb.GenerateTextRequest(token_ids=common_pb2.TokenIds(values=[3] * MESSAGE_BYTES))
        ),
    }


def together(request: GenerationRequest, count: int) -> Ask:
    return each([request] * count)


def each(requests: Iterable[GenerationRequest]) -> Ask:
    requests = list(requests)

    async def ask(client: Client, _: GenerationServiceStub) -> None:
        await asyncio.gather(*(client.complete_all(request) for request in requests))

    return ask


def raw(message: pb.GenerateTextRequest) -> Ask:
    async def ask(_: Client, stub: GenerationServiceStub) -> None:
        with translated_errors():
            call: Any = stub.GenerateText(message)
            await call.read()

    return ask


async def measure() -> dict[str, Hold]:
    """Send the inputs one after the other; return how long each held the loop, and its outcome."""
    async with instant_models("--max-length", str(MAX_LENGTH), "--echo") as models:
        flags = [*models.flags, "--metrics-port", "0", "--log-level", "error"]
        flags += ["--batch-size", "64"]
        async with (
            running_service(MODULE, flags) as service,
            Client(service.address, NO_RETRIES) as client,
            open_channel(service.address) as channel,
        ):
            assert service.metrics_url
            found: dict[str, Hold] = {}
            for name, ask in inputs().items():
                longest_s = []
                for _ in range(TIMES):
                    await longest_hold_s(service.metrics_url)
                    outcome = await outcome_of(ask, client, GenerationServiceStub(channel))
                    longest_s.append(await longest_hold_s(service.metrics_url))
                found[name] = Hold(tuple(longest_s), outcome)
            return found


async def outcome_of(ask: Ask, client: Client, stub: GenerationServiceStub) -> str:
    try:
        await ask(client, stub)
    except PacelineError as error:
        return f"{error.code.name}: {error.message[:60]}"
    return grpc.StatusCode.OK.name


async def longest_hold_s(metrics_url: str) -> float:
    """Return the longest hold since the last call."""
    return next(one.value for one in await scraped(metrics_url) if one.name == METRIC)


def are_short(found: Mapping[str, Hold]) -> bool:
    return all(hold.is_short for hold in found.values())


def milliseconds(found: Mapping[str, Hold]) -> dict[str, list[float]]:
    return {name: [round(1e3 * one, 2) for one in hold.longest_s] for name, hold in found.items()}


def table(found: Mapping[str, Hold]) -> Table:
    made = Table("input", "least, ms", "most, ms", "", "ended", title="Longest hold of the coordinator's event loop")
    for name, hold in found.items():
        verdict = "" if hold.is_short else f"over {1e3 * LIMIT_S:g}"
        least_ms, most_ms = 1e3 * min(hold.longest_s), 1e3 * max(hold.longest_s)
        made.add_row(name, f"{least_ms:.1f}", f"{most_ms:.1f}", verdict, hold.outcome)
    return made


if __name__ == "__main__":
    result = asyncio.run(measure())
    Console(highlight=False).print(table(result))
    sys.exit(not are_short(result))
