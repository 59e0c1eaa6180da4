"""The parts of the benchmark: each runs what it needs, prints what it finds, and returns whether it is as promised."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.door.calls import FORMS, called_counts, target_with_template
from benchmarks.door.cost import first_token_ms, streams_at_once, tokens_per_s
from benchmarks.door.exact import Prompts, equal_count, outputs_by_way
from benchmarks.door.failover import outlived_count
from benchmarks.door.formats import followed_counts
from benchmarks.door.http import HttpClient, running_door
from benchmarks.door.malformed import drawn_requests, refusals
from benchmarks.instant_models import instant_models
from paceline.client import Client
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.model_service.worker import ModelWorker
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from paceline.process.service_process import running_service
from tests.fuzzing.bad_requests import MAX_BODY_BYTES

console = Console(highlight=False, width=120)
TARGET = "builtin:target"
TEMPERATURES = (0.0, 1.0)
BATCH_SIZE = 8
OUTLIVING = 50
FORMATS = 200
CALLS = 50
"""Forced ones and free ones, in either form."""
MALFORMED = 5000
MALFORMED_SEED = 1


@dataclass(frozen=True)
class Sizes:
    prompts: Prompts
    max_new_tokens: int
    runs: int
    first_token_count: int
    stream_count: int


@asynccontextmanager
async def _cluster(target: str = TARGET) -> AsyncIterator[str]:
    """Run the pair; yield the coordinator's address."""
    async with running_cluster(ClusterOptions(target_model=target, batch_size=BATCH_SIZE)) as services:
        yield services.coordinator


async def _pair(sizes: Sizes) -> bool:
    prompts, is_right = sizes.prompts, True
    async with _cluster() as coordinator, Client(coordinator) as grpc, running_door(coordinator) as http:
        for temperature in TEMPERATURES:
            is_right &= await _ids(grpc, http, sizes, temperature)
        pairs = await tokens_per_s(grpc, http, prompts, sizes.max_new_tokens, sizes.runs)
    by_grpc, by_http = (median(one) for one in zip(*pairs, strict=True))
    share = median(http / grpc for grpc, http in pairs)
    console.print(f"tokens/s at B = {BATCH_SIZE}: {by_grpc:.0f} by gRPC, {by_http:.0f} by HTTP, {share:.3f} in turn")
    return is_right


async def _ids(grpc: Client, http: HttpClient, sizes: Sizes, temperature: float) -> bool:
    prompts = sizes.prompts
    ways = await outputs_by_way(grpc, http, prompts, sizes.max_new_tokens, temperature)
    counts = [equal_count(ways.grpc, one) for one in (ways.http, ways.streamed)]
    console.print(f"T = {temperature:g}: {counts[0]} and {counts[1]} of {len(prompts)} equal gRPC, streamed last")
    if not temperature:
        counts.append(equal_count(ways.grpc, await _hugging_face(prompts, sizes.max_new_tokens)))
        console.print(f"T = 0: {counts[-1]} of {len(prompts)} equal Hugging Face")
    return set(counts) == {len(prompts)}


async def _hugging_face(prompts: Prompts, max_new_tokens: int) -> list[list[int]]:
    worker = ModelWorker(None)
    reference = await worker.run(HuggingFaceReference, TARGET, "float32")
    outputs = [await worker.run(reference.generate, prompt, max_new_tokens) for prompt in prompts]
    worker.close()
    return outputs


async def _formats(sizes: Sizes) -> bool:
    async with _cluster() as coordinator, Client(coordinator) as grpc, running_door(coordinator) as http:
        valid, equal = await followed_counts(http, sizes.prompts, FORMATS)
        told = (await grpc.describe()).statistics
    console.print(
        f"JSON Schemas: {valid} of {FORMATS} valid, {equal} of {FORMATS} equal plain decoding, "
        f"{told.accepted_count} of {told.drafted_count} drafted tokens accepted"
    )
    return valid == equal == FORMATS and told.accepted_count > 0


async def _calls(_: Sizes) -> bool:
    is_right = True
    with target_with_template() as target:
        async with _cluster(target) as coordinator:
            for form in FORMS:
                async with running_door(coordinator, "--tool-format", form) as http:
                    for is_forced in (True, False):
                        called, equal = await called_counts(http, form, CALLS, is_forced=is_forced)
                        console.print(
                            f"{'forced' if is_forced else 'free'} calls, {form}: {called} of {CALLS} parse, "
                            f"{equal} of {CALLS} equal plain decoding"
                        )
                        is_right &= called == equal == CALLS
    return is_right


async def _malformed(sizes: Sizes) -> bool:
    requests = drawn_requests(MALFORMED, MALFORMED_SEED)
    good = {"prompt": sizes.prompts[0], "max_tokens": sizes.max_new_tokens, "temperature": 0}
    async with (
        _cluster() as coordinator,
        running_door(coordinator, "--max-body-bytes", str(MAX_BODY_BYTES)) as http,
    ):
        before = (await http.complete(good)).token_ids
        found = await refusals(http.address, requests)
        is_same = (await http.complete(good)).token_ids == before
        is_well = await http.is_well()
    for counts in (found.statuses, found.defects):
        console.print(", ".join(f"{count} {word}" for word, count in counts.most_common()))
    for line in found.complaints:
        console.print(line, markup=False)
    console.print(
        f"bad requests: {len(requests) - len(found.complaints)} of {MALFORMED} refused in OpenAI's form; afterwards "
        f"{'healthy' if is_well else 'NOT healthy'}, with {'the same' if is_same else 'ANOTHER'} output"
    )
    return len(requests) == MALFORMED and not found.complaints and is_same and is_well


async def _instant(sizes: Sizes) -> bool:
    stream_count = sizes.stream_count
    async with instant_models() as models:
        flags = [*models.flags, "--log-level", "error", "--batch-size", str(BATCH_SIZE)]
        async with (
            running_service("coordinator", flags) as coordinator,
            Client(coordinator.address) as grpc,
            running_door(coordinator.address) as http,
        ):
            by_grpc, by_http = await first_token_ms(grpc, http, (5, 6, 7), sizes.first_token_count)
            console.print(
                f"ms to the first token, instant models: {by_grpc:.2f} by gRPC, {by_http:.2f} by HTTP, "
                f"{by_http - by_grpc:+.2f}"
            )
            whole, rate = await streams_at_once(http, [(5, 6, 7)] * stream_count, 100)
    console.print(f"{whole} of {stream_count} streams at once were whole, {rate:.0f} tokens/s")
    return whole == stream_count


async def _failover(_: Sizes) -> bool:
    outlived = await outlived_count(OUTLIVING)
    console.print(f"{outlived} of {OUTLIVING} streams outlived a killed coordinator of two, every token right")
    return outlived == OUTLIVING


PARTS: Mapping[str, Callable[[Sizes], Coroutine[Any, Any, bool]]] = {
    "pair": _pair,
    "formats": _formats,
    "calls": _calls,
    "malformed": _malformed,
    "instant": _instant,
    "failover": _failover,
}
