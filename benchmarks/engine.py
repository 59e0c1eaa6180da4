"""Cost of the engine beside Hugging Face's own forward, and bytes its cache copies: `python -m benchmarks.engine`.

Random weights, float32, CPU, one process. Compared calls alternate, and medians are shown; absolute times are noise.
"""

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.commands import run_command
from paceline.engine.cache.paged import KvPool
from paceline.engine.loading import load_model
from paceline.engine.model.compiled_decoder import CompiledDecoder
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.types import Layout, SequenceLength

LENGTHS = (50, 130, 210, 285, 360, 440, 520, 600)
"""Cached tokens of the eight ragged rows."""
NEW_COUNT = 6
SHAPES: dict[str, dict[str, Any]] = {
    "10 M": {"hidden_size": 320, "num_hidden_layers": 7, "intermediate_size": 880, "head_dim": 64},
    "100 M": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2560, "head_dim": 64},
}
KV_MEMORY = "4GiB"


def main(
    threads: Annotated[int, typer.Option(help="Threads of both sides.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed repeats of each, alternating.")] = 30,
) -> None:
    """Print the table of what the engine must hold."""
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    table = Table("model", "measure", "value", title=f"engine, {threads} thread(s), {repeats} repeats")
    with tempfile.TemporaryDirectory() as folder:
        for name in SHAPES:
            path = write_model(Path(folder) / name.replace(" ", ""), name)
            for measure, value in measures(path, repeats):
                table.add_row(name, measure, value)
    Console().print(table)


def write_model(folder: Path, name: str) -> Path:
    shape = SHAPES[name]
    heads = shape["hidden_size"] // shape["head_dim"]
    config = LlamaConfig(
        vocab_size=4096,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **shape,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measures(path: Path, repeats: int) -> Iterable[tuple[str, str]]:
    model = load_model(str(path), "float32")
    yield "parameters", f"{model.description.parameter_count / 1e6:.1f} M"
    ways = [Runner(one, EngineOptions(KV_MEMORY)) for one in (model, with_torch_alone(model))]
    ours, torchs, theirs = verify_times(path, ways, repeats)
    yield "verify, 8 ragged rows of 6", f"{1e3 * ours:.2f} ms"
    yield "the same by torch's operations alone", f"{1e3 * torchs:.2f} ms"
    yield "Hugging Face, 8 equal rows of 6 at the mean length", f"{1e3 * theirs:.2f} ms"
    yield "ratio", f"{ours / theirs:.2f}"
    copied = copied_bytes(Runner(with_torch_alone(model), EngineOptions(KV_MEMORY)))
    new_bytes = len(LENGTHS) * NEW_COUNT * model.kv_shape.token_bytes
    yield "cache bytes copied a round / bytes of the new keys and values", f"{copied} / {new_bytes}"
    for length in (100, 1_000, 10_000):
        yield f"rollback of 6 of {length} tokens", f"{1e6 * rollback_time(model, length):.1f} us"
    layouts: tuple[Layout, ...] = ("paged", "dense")
    for layout in layouts:
        share = realignment_share(Runner(model, EngineOptions("8GiB", layout=layout)), repeats)
        yield f"realignment, {layout} layout", f"{share:.1%} of round time"
    yield from shared_prompt(Runner(model, EngineOptions(KV_MEMORY)))
    yield from stall(Runner(model, EngineOptions(KV_MEMORY)))


def with_torch_alone(model: LoadedModel) -> LoadedModel:
    """Return the model without compiled operations, whose copies torch does not see."""
    return replace(model, decoder=model.decoder.plain) if isinstance(model.decoder, CompiledDecoder) else model


def tokens(count: int, start: int = 0) -> tuple[int, ...]:
    return tuple((start + 7 * n) % 4000 + 5 for n in range(count))


def fill(runner: Runner, sequence_id: str, token_ids: tuple[int, ...]) -> None:
    """Prefill, chunk after chunk."""
    while (length := runner.cache.length(sequence_id)) < len(token_ids):
        runner.forward([PackedRow(sequence_id, length, token_ids[length:])])


def ragged_rows(runner: Runner) -> list[PackedRow]:
    for number, length in enumerate(LENGTHS):
        fill(runner, str(number), tokens(length, number))
    return [
        PackedRow(str(number), length, tokens(NEW_COUNT, number), draft_count=NEW_COUNT - 1)
        for number, length in enumerate(LENGTHS)
    ]


def alternate(repeats: int, *calls: Callable[[], Any]) -> list[float]:
    """Return the median seconds of each call, taken in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 3):
        for call, taken in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    return [median(taken[3:]) for taken in times]


def verify_times(path: Path, runners: list[Runner], repeats: int) -> list[float]:
    """Return the seconds of our ragged verify by each runner, and of Hugging Face's forward over an equal rectangle."""
    for runner in runners:
        rows = ragged_rows(runner)
    reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    mean_length = sum(LENGTHS) // len(LENGTHS)
    cache = DynamicCache(config=reference.config)
    prompt = torch.tensor([tokens(mean_length, number) for number in range(len(LENGTHS))])
    new = torch.tensor([tokens(NEW_COUNT, number) for number in range(len(LENGTHS))])

    def theirs() -> None:
        with torch.inference_mode():
            reference(input_ids=new, past_key_values=cache, use_cache=True)
            cache.crop(-NEW_COUNT)

    with torch.inference_mode():
        reference(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return alternate(repeats, *(partial(runner.forward, rows) for runner in runners), theirs)


class CacheTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes that operations copy into or out of one memory."""

    COPYING = ("index_copy_", "copy_", "cat", "clone", "_to_copy", "index_select", "index", "constant_pad_nd")

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory.untyped_storage().data_ptr()
        self.copied_bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.COPYING:
            flat = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
            tensors = [one for one in flat if isinstance(one, torch.Tensor)]
            inside = [one.untyped_storage().data_ptr() == self._memory for one in tensors]
            if inside and inside[0] and func.overloadpacket.__name__.endswith("copy_"):
                self.copied_bytes += tensors[-1].nbytes
            elif any(inside):
                self.copied_bytes += result.nbytes
        return result


def copied_bytes(runner: Runner) -> int:
    rows = ragged_rows(runner)
    assert isinstance(runner.cache, KvPool)
    traffic = CacheTraffic(runner.cache.slots.memory)
    with traffic:
        runner.forward(rows)
    return traffic.copied_bytes


def rollback_time(model: LoadedModel, length: int) -> float:
    pool = KvPool(model.kv_shape, (length + 64) * model.kv_shape.token_bytes, page_tokens=16)
    times = []
    for _ in range(200):
        pool.keep("a", 0, ())
        pool.append("a", tokens(length))
        began = time.perf_counter()
        pool.truncate("a", length - NEW_COUNT)
        times.append(time.perf_counter() - began)
        pool.release("a")
    return median(times)


def realignment_share(runner: Runner, repeats: int) -> float:
    """Return realignment's share of the time of rounds in which rows accept 0 to 5 drafts, all differently."""
    rows = ragged_rows(runner)
    before, began = runner.cache.describe().realignment_s, time.perf_counter()
    for number in range(repeats):
        runner.forward(rows)
        lengths = [length + (number * 5 + index * 3) % NEW_COUNT for index, length in enumerate(LENGTHS)]
        runner.rollback([SequenceLength(str(index), length) for index, length in enumerate(lengths)])
        rows = [PackedRow(str(i), n, tokens(NEW_COUNT, i), draft_count=NEW_COUNT - 1) for i, n in enumerate(lengths)]
    return (runner.cache.describe().realignment_s - before) / (time.perf_counter() - began)


def shared_prompt(runner: Runner) -> Iterable[tuple[str, str]]:
    """Run eight sequences at once, each one 512-token prompt and a token of its own."""
    prompt = tokens(512)
    rows = [PackedRow(str(number), 0, (*prompt, number + 5)) for number in range(8)]
    calls = 0
    while any(runner.cache.length(row.sequence_id) < len(row.token_ids) for row in rows):
        runner.forward(
            [
                PackedRow(row.sequence_id, length, row.token_ids[length:])
                for row in rows
                if (length := runner.cache.length(row.sequence_id)) < len(row.token_ids)
            ]
        )
        calls += 1
    cache = runner.describe().cache
    yield "8 x one 512-token prompt: tokens held", f"{cache.used_bytes // cache.token_bytes} of {8 * 513}"
    yield "8 x one 512-token prompt: tokens computed", f"{8 * 513 - cache.shared_token_count}, in {calls} calls"


def stall(runner: Runner) -> Iterable[tuple[str, str]]:
    """Measure how long decoding rows wait while a 1,500-token prompt arrives beside them."""
    rows = [PackedRow(row.sequence_id, row.base_length, row.token_ids[:1]) for row in ragged_rows(runner)]
    (alone_s,) = alternate(10, lambda: runner.forward(rows))
    prompt = tokens(1500, 3)
    slowest_s = 0.0
    while (length := runner.cache.length("long")) < len(prompt):
        began = time.perf_counter()
        runner.forward([*rows, PackedRow("long", length, prompt[length:])])
        slowest_s = max(slowest_s, time.perf_counter() - began)
    began = time.perf_counter()
    runner.forward([PackedRow("chunk", 0, tokens(runner.describe().cache.prefill_chunk_tokens, 9))])
    chunk_s = time.perf_counter() - began
    yield "decoding round", f"{1e3 * alone_s:.1f} ms"
    yield "slowest one while a 1,500-token prompt arrives", f"{1e3 * slowest_s:.0f} ms"
    yield "a chunk of a prompt alone", f"{1e3 * chunk_s:.0f} ms"


if __name__ == "__main__":
    run_command(main)
