"""Round times of both models beside the floor, at the shapes of a real pair: `python -m benchmarks.rounds`.

Weights are random and made on the device. The floor of a pass is the bytes it must read, weights and cache, over the
bandwidth of a large copy. `--layers` cuts both models, so that the script can be tried on a small machine.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from draft_service.drafter import Drafter
from paceline.engine.attention.common import ATTENTION_NAME
from paceline.engine.loading import as_loaded
from paceline.engine.model.loader import resolve_device
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.measure.traffic import config_traffic, copy_bandwidth
from paceline.types import Proposal, ProposeRow, Verdict, VerifyRow
from target_service.verifier import Verifier

COMMON = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40_960}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}
DTYPE = torch.bfloat16


def main(
    device: str = "auto",
    batch_sizes: Annotated[list[int], typer.Option("--batch-size")] = [1, 8, 32],  # noqa: B006 - typer reads it only
    draft_count: int = 5,
    cached_tokens: Annotated[int, typer.Option(help="Cached tokens of each row.")] = 512,
    layers: Annotated[int | None, typer.Option(help="Layers of both models; unset: as many as theirs.")] = None,
    repeats: int = 20,
    kv_memory: str = "16GiB",
) -> None:
    """Print a table of verify and propose times, their floors, and how near they are."""
    place = torch.device(resolve_device(device))
    bandwidth = copy_bandwidth(str(place))
    models = {name: random_model(name, place, layers) for name in SHAPES}
    table = Table("B", "hop", "ms", "floor ms", "of the floor", title=f"{place}, {bandwidth / 1e9:.0f} GB/s copied")
    target, draft = (Runner(model, EngineOptions(kv_memory)) for model in models.values())
    target_traffic, draft_traffic = (config_traffic(config(name, layers), DTYPE, DTYPE) for name in SHAPES)
    for batch_size in batch_sizes:
        verify_s = verify_time(Verifier(target), batch_size, draft_count, cached_tokens, repeats)
        propose_s = propose_time(Drafter(draft), batch_size, draft_count, cached_tokens, repeats)
        for hop, traffic, passes, spent_s in (
            ("verify", target_traffic, 1, verify_s),
            ("propose", draft_traffic, draft_count, propose_s),
        ):
            pass_bytes = traffic.weight_bytes + batch_size * cached_tokens * traffic.token_bytes
            floor_s = passes * pass_bytes / bandwidth
            table.add_row(
                str(batch_size), hop, f"{1e3 * spent_s:.2f}", f"{1e3 * floor_s:.2f}", f"{floor_s / spent_s:.0%}"
            )
    Console().print(table)


def random_model(name: str, device: torch.device, layers: int | None) -> LoadedModel:
    torch.manual_seed(0)
    with device:
        module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config(name, layers), dtype=DTYPE, attn_implementation=ATTENTION_NAME
        )
    return as_loaded(module.eval(), name, None)


def config(name: str, layers: int | None) -> Qwen3Config:
    return Qwen3Config(**COMMON | SHAPES[name] | ({"num_hidden_layers": layers} if layers else {}))


def prompt(number: int, count: int) -> tuple[int, ...]:
    return tuple((number * 7919 + 31 * place) % 150_000 for place in range(count))


def fill(runner: Runner, batch_size: int, count: int) -> None:
    for number in range(batch_size):
        while (length := runner.cache.length(str(number))) < count:
            runner.forward([PackedRow(str(number), length, prompt(number, count)[length:])])


def verify_time(verifier: Verifier, batch_size: int, draft_count: int, cached_tokens: int, repeats: int) -> float:
    fill(verifier.runner, batch_size, cached_tokens)
    drafts = tuple(range(100, 100 + draft_count))
    rows = [VerifyRow(str(number), cached_tokens, (5,), drafts) for number in range(batch_size)]

    def verify() -> None:
        assert all(isinstance(one, Verdict) for one in verifier.verify(rows))

    return timed(verify, verifier.runner.model.kv_shape.device, repeats)


def propose_time(drafter: Drafter, batch_size: int, draft_count: int, cached_tokens: int, repeats: int) -> float:
    fill(drafter.runner, batch_size, cached_tokens)
    rows = [ProposeRow(str(number), cached_tokens, (5,), draft_count) for number in range(batch_size)]

    def propose() -> None:
        assert all(isinstance(one, Proposal) for one in drafter.propose(rows))

    return timed(propose, drafter.runner.model.kv_shape.device, repeats)


def timed(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median seconds of the work, the device's included, after two warm-up runs."""
    spent = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return median(spent[2:])


if __name__ == "__main__":
    typer.run(main)
