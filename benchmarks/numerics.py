"""Operations whose rounding depends on their shape, and the cost of strict numerics: `python -m benchmarks.numerics`.

It is the source of docs/numerics.md, and uses a CPU, random numbers and the built-in pair.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks.commands import run_command
from paceline.cli.prompts import PROMPTS
from paceline.client import Client
from paceline.engine.attention.paged import PagedAttention
from paceline.engine.interfaces import Span
from paceline.engine.native import Kernels, find_kernels, packed
from paceline.engine.plan import BatchPlan
from paceline.errors import StartupError
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from paceline.types import GenerationRequest, UserMessage

TORCH_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUR_DTYPES = (torch.bfloat16, torch.float32)
TRIALS = 40
HEADS, HEAD_SIZE, CACHED, PAGE_COUNT = 3, 48, 300, 20
Trial = Callable[[torch.dtype], bool]
"""Draws numbers of a dtype and returns whether rows stay equal, bit for bit."""


def main(max_new_tokens: int = 120, repeats: int = 3, threads: int = 1) -> None:
    """Print both tables."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kernels = find_kernels()
    if kernels is None:
        raise StartupError("the compiled kernels were not built; install the package where there is a C++17 compiler")
    console = Console()
    console.print(operations(kernels))
    console.print(asyncio.run(outputs(max_new_tokens, repeats, threads)))


def operations(kernels: Kernels) -> Table:
    """Return the share of trials in which rows alone are bit for bit as among others."""
    names = [
        f"{whose} {dtype}" for whose, dtypes in (("torch", TORCH_DTYPES), ("ours", OUR_DTYPES)) for dtype in dtypes
    ]
    table = Table("operation", *(name.replace("torch.", "") for name in names), title="rows that stay equal")
    trials: dict[str, tuple[Trial, Trial]] = {}
    for size in (288, 2048):
        for count in (1, 6):
            trials[f"product over {size} numbers, {count} of 64 rows"] = (
                partial(torch_product, size, count),
                partial(own_product, size, count),
            )
    trials["norm, 1 of 64 rows"] = (torch_norm, partial(own_norm, kernels))
    trials["attention, 1 of 6 queries"] = (torch_attention, partial(own_attention, kernels))
    for name, (of_torch, own) in trials.items():
        counts = [sum(of_torch(dtype) for _ in range(TRIALS)) for dtype in TORCH_DTYPES]
        counts += [sum(own(dtype) for _ in range(TRIALS)) for dtype in OUR_DTYPES]
        table.add_row(name, *(f"{count / TRIALS:.0%}" for count in counts))
    return table


def torch_product(size: int, count: int, dtype: torch.dtype) -> bool:
    weight, rows = torch.randn(512, size).to(dtype), torch.randn(64, size).to(dtype)
    return torch.equal(F.linear(rows[:count], weight), F.linear(rows, weight)[:count])


def own_product(size: int, count: int, dtype: torch.dtype) -> bool:
    multiply, rows = packed(torch.randn(512, size).to(dtype), None), torch.randn(64, size).to(dtype)
    assert multiply
    return torch.equal(multiply(rows[:count]), multiply(rows)[:count])


def torch_norm(dtype: torch.dtype) -> bool:
    rows = torch.randn(64, 288).to(dtype)
    alone, among = (one * one.pow(2).mean(-1, keepdim=True).rsqrt() for one in (rows[:1], rows))
    return torch.equal(alone, among[:1])


def own_norm(kernels: Kernels, dtype: torch.dtype) -> bool:
    rows, weight = torch.randn(64, 288), torch.randn(288)
    alone, among = (kernels.add_and_norm(one.clone(), None, weight, 1e-5, dtype) for one in (rows[:1], rows))
    return torch.equal(alone, among[:1])


def torch_attention(dtype: torch.dtype) -> bool:
    query, keys, values = (torch.randn(1, HEADS, count, HEAD_SIZE).to(dtype) for count in (6, CACHED, CACHED))
    whole, part = (F.scaled_dot_product_attention(one, keys, values) for one in (query, query[:, :, :1]))
    return torch.equal(part, whole[:, :, :1])


def own_attention(kernels: Kernels, dtype: torch.dtype) -> bool:
    """The first of six new tokens is asked alone too; the cache holds the tokens before them."""
    memory = torch.randn(2, HEADS, 16 * PAGE_COUNT, HEAD_SIZE).to(dtype)
    projected, pages = torch.randn(6, 3 * HEADS * HEAD_SIZE), [range(PAGE_COUNT)]
    rotation = torch.ones(CACHED + 6, HEAD_SIZE), torch.zeros(CACHED + 6, HEAD_SIZE)
    found = []
    for count in (1, 6):
        attention = PagedAttention(memory.clone(), 1, BatchPlan([Span("", 0, count, CACHED + count)], pages, 16))
        rows = kernels.rows_of(attention)
        assert rows
        own = projected[:count].clone()
        found.append(kernels.attend(rows, own, *attention.memory(0), rotation, None, 0.0, HEAD_SIZE**-0.5)[:1])
    return torch.equal(*found)


async def outputs(max_new_tokens: int, repeats: int, threads: int) -> Table:
    """Compare speculative and plain outputs and speed, for the demo prompts on the built-in pair."""
    title = f"built-in pair, B = 8, {len(PROMPTS)} prompts, {threads} threads of the target"
    table = Table("dtype", "numerics", "equal to plain", "plain tokens/s", "speculative tokens/s", title=title)
    for dtype in ("bfloat16", "float16"):
        for numerics in ("fast", "strict"):
            options = ClusterOptions(dtype=dtype, numerics=numerics, target_threads=threads, prefix_sharing=False)
            table.add_row(dtype, numerics, *await measured(options, max_new_tokens, repeats))
    return table


async def measured(options: ClusterOptions, max_new_tokens: int, repeats: int) -> list[str]:
    """Return how many outputs equal plain decoding's, and the best rates without and with drafts."""
    async with running_cluster(options) as addresses, Client(addresses.coordinator) as client:
        runs = []
        for _ in range(repeats):
            for max_draft_count in (0, None):
                runs.append(await answer(client, max_new_tokens, max_draft_count))
    (plain, _), (speculative, _) = runs[-2:]
    equal = sum(one == other for one, other in zip(plain, speculative, strict=True))
    rates = [max(rate for _, rate in runs[kind::2]) for kind in (0, 1)]
    return [f"{equal} of {len(PROMPTS)}", *(f"{rate:.0f}" for rate in rates)]


async def answer(client: Client, max_new_tokens: int, max_draft_count: int | None) -> tuple[list[list[int]], float]:
    began = time.perf_counter()
    completions = await asyncio.gather(
        *(
            client.complete(
                GenerationRequest(UserMessage(prompt), max_new_tokens=max_new_tokens, max_draft_count=max_draft_count)
            )
            for prompt in PROMPTS
        )
    )
    token_ids = [completion.token_ids for completion in completions]
    return token_ids, sum(map(len, token_ids)) / (time.perf_counter() - began)


if __name__ == "__main__":
    run_command(main)
