"""The HTTP door beside gRPC: `python -m benchmarks.door`.

Prints how many outputs are the same ids by each way, what the door adds to the first token over instant models, what
share of the tokens a second of the built-in pair it takes, whether many streams at once are all whole, and whether they
outlive a killed coordinator. Exit status 1 when an output differs or a stream is not whole.
"""

import asyncio
import sys
from statistics import median

import typer
from rich.console import Console

from benchmarks.coordinator import instant_models
from benchmarks.door.cost import first_token_ms, streams_at_once, tokens_per_s
from benchmarks.door.exact import Prompts, equal_count, outputs_by_way
from benchmarks.door.failover import outlived_count
from benchmarks.door.http import http_client
from paceline.cli.options import InputFile
from paceline.cli.prompts import selected_lines
from paceline.client import Client
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.measure.prompts import encode_lines, read_text_codec
from paceline.model_service.worker import ModelWorker
from paceline.process.launcher import ClusterOptions, running_cluster, running_service

console = Console(highlight=False, width=120)
TEMPERATURES = (0.0, 1.0)
BATCH_SIZE = 8
MAX_PROMPT_TOKENS = 400
OUTLIVING = 50


def main(
    input_file: InputFile = None,
    prompt_count: int = 80,
    max_new_tokens: int = 64,
    runs: int = 5,
    first_token_count: int = 200,
    stream_count: int = 200,
) -> None:
    pair = ClusterOptions(batch_size=BATCH_SIZE, gateway_port=0)
    lines = selected_lines(input_file, None, prompt_count)
    encoded = encode_lines(
        lines, read_text_codec(pair.target_model, pair.draft_model), chat=True, max_prompt_tokens=MAX_PROMPT_TOKENS
    )
    prompts = [one.token_ids for one in encoded]
    is_right = asyncio.run(_over_pair(pair, prompts, max_new_tokens, runs))
    is_right &= asyncio.run(_over_instant_models(first_token_count, stream_count))
    outlived = asyncio.run(outlived_count(OUTLIVING))
    console.print(f"{outlived} of {OUTLIVING} streams outlived a killed coordinator of two, every token right")
    is_right &= outlived == OUTLIVING
    sys.exit(not is_right)


async def _over_pair(pair: ClusterOptions, prompts: Prompts, max_new_tokens: int, runs: int) -> bool:
    is_right = True
    async with (
        running_cluster(pair) as services,
        Client(services.coordinator) as grpc,
        http_client(f"http://{services.gateway}") as http,
    ):
        for temperature in TEMPERATURES:
            ways = await outputs_by_way(grpc, http, prompts, max_new_tokens, temperature)
            counts = [equal_count(ways.grpc, one) for one in (ways.http, ways.streamed)]
            console.print(
                f"T = {temperature:g}: {counts[0]} and {counts[1]} of {len(prompts)} equal gRPC, streamed last"
            )
            is_right &= counts == [len(prompts)] * 2
            if not temperature:
                alone = await _hugging_face(pair.target_model, prompts, max_new_tokens)
                count = equal_count(ways.grpc, alone)
                console.print(f"T = 0: {count} of {len(prompts)} equal Hugging Face")
                is_right &= count == len(prompts)
        pairs = await tokens_per_s(grpc, http, prompts, max_new_tokens, runs)
    by_grpc, by_http = (median(one) for one in zip(*pairs, strict=True))
    share = median(http / grpc for grpc, http in pairs)
    console.print(f"tokens/s at B = {BATCH_SIZE}: {by_grpc:.0f} by gRPC, {by_http:.0f} by HTTP, {share:.3f} in turn")
    return is_right


async def _hugging_face(model: str, prompts: Prompts, max_new_tokens: int) -> list[list[int]]:
    worker = ModelWorker(None)
    reference = await worker.run(HuggingFaceReference, model, "float32")
    outputs = [await worker.run(reference.generate, prompt, max_new_tokens) for prompt in prompts]
    worker.close()
    return outputs


async def _over_instant_models(first_token_count: int, stream_count: int) -> bool:
    async with instant_models() as (draft, target):
        flags = ["--draft", draft, "--target", target, "--log-level", "error", "--batch-size", str(BATCH_SIZE)]
        async with (
            running_service("coordinator", flags) as coordinator,
            running_service(
                "paceline.gateway", ["--coordinator", coordinator.address, "--port", "0", "--log-level", "error"]
            ) as door,
            Client(coordinator.address) as grpc,
            http_client(f"http://{door.address}") as http,
        ):
            by_grpc, by_http = await first_token_ms(grpc, http, (5, 6, 7), first_token_count)
            console.print(
                f"ms to the first token, instant models: {by_grpc:.2f} by gRPC, {by_http:.2f} by HTTP, "
                f"{by_http - by_grpc:+.2f}"
            )
            whole, rate = await streams_at_once(http, [(5, 6, 7)] * stream_count, 100)
    console.print(f"{whole} of {stream_count} streams at once were whole, {rate:.0f} tokens/s")
    return whole == stream_count


if __name__ == "__main__":
    typer.run(main)
