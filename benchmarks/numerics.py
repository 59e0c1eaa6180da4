"""Operations that round differently when the shape changes, and the effect on outputs: `python -m benchmarks.numerics`.

It is the source of docs/numerics.md, and uses a CPU, random weights and the built-in pair.
"""

import asyncio
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.prompts import PROMPTS
from paceline.client import Client
from paceline.process.launcher import ClusterOptions, running_cluster
from paceline.types import GenerationRequest, UserMessage

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRIALS = 40


def main(max_new_tokens: int = 120, repeats: int = 3, threads: int = 1) -> None:
    """Print both tables."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    console = Console()
    console.print(operations())
    console.print(asyncio.run(outputs(max_new_tokens, repeats, threads)))


def operations() -> Table:
    """Return the share of trials in which every row is bit for bit as in the shape that strict numerics fixes."""
    table = Table("operation", *(str(dtype).removeprefix("torch.") for dtype in DTYPES), title="rows that stay equal")
    trials: dict[str, Callable[[torch.dtype], bool]] = {
        "linear, 1 row of 64": lambda dtype: linear(dtype, 1),
        "linear, 6 rows of 64": lambda dtype: linear(dtype, 6),
        "linear, 64 rows in another order": lambda dtype: linear(dtype, 64),
        "RMS norm, 1 row of 64": rms_norm,
        "attention, 1 query of 6": lambda dtype: attention(dtype, 300, 300),
        "attention, keys padded from 300 to 320": lambda dtype: attention(dtype, 300, 320, queries=6),
    }
    for name, trial in trials.items():
        shares = [sum(trial(dtype) for _ in range(TRIALS)) / TRIALS for dtype in DTYPES]
        table.add_row(name, *(f"{share:.0%}" for share in shares))
    return table


def linear(dtype: torch.dtype, rows: int) -> bool:
    weight, x = torch.randn(768, 288).to(dtype), torch.randn(64, 288).to(dtype)
    order = torch.randperm(64) if rows == 64 else torch.arange(rows)
    return torch.equal(F.linear(x[order], weight), F.linear(x, weight)[order])


def rms_norm(dtype: torch.dtype) -> bool:
    x = torch.randn(64, 288).to(dtype)
    alone, among = (one * one.pow(2).mean(-1, keepdim=True).rsqrt() for one in (x[:1], x))
    return torch.equal(alone, among[:1])


def attention(dtype: torch.dtype, length: int, width: int, queries: int = 1) -> bool:
    query, keys, values = (torch.randn(1, 3, count, 48).to(dtype) for count in (6, length, length))
    whole = F.scaled_dot_product_attention(query, keys, values)
    wide_keys, wide_values = (F.pad(one, (0, 0, 0, width - length)) for one in (keys, values))
    mask = torch.zeros(queries, width, dtype=dtype)
    mask[:, length:] = float("-inf")
    part = F.scaled_dot_product_attention(query[:, :, :queries], wide_keys, wide_values, attn_mask=mask)
    return torch.equal(part, whole[:, :, :queries])


async def outputs(max_new_tokens: int, repeats: int, threads: int) -> Table:
    """Compare speculative and plain outputs and speed, for the demo prompts on the built-in pair in bfloat16."""
    title = f"built-in pair, bfloat16, B = 8, {len(PROMPTS)} prompts"
    table = Table("numerics", "equal to plain", "plain tokens/s", "speculative tokens/s", title=title)
    for numerics in ("fast", "strict"):
        options = ClusterOptions(dtype="bfloat16", numerics=numerics, target_threads=threads, prefix_sharing=False)
        async with running_cluster(options) as addresses, Client(addresses.coordinator) as client:
            runs = []
            for _ in range(repeats):
                for max_draft_count in (0, None):
                    runs.append(await answer(client, max_new_tokens, max_draft_count))
        (plain, _), (speculative, _) = runs[-2:]
        equal = sum(one == other for one, other in zip(plain, speculative, strict=True))
        rates = [max(rate for _, rate in runs[kind::2]) for kind in (0, 1)]
        table.add_row(numerics, f"{equal} of {len(PROMPTS)}", *(f"{rate:.0f}" for rate in rates))
    return table


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
    typer.run(main)
