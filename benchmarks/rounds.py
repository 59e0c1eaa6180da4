"""Round times of both models beside the floor, at the shapes of a real pair: `python -m benchmarks.rounds`.

Weights are random and made on the device. The floor of a pass is the bytes it must read, weights and cache, over the
bandwidth of a large copy. `--layers` and `--vocabulary-size` cut both models, so that the script can be tried on a
small machine.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from benchmarks.commands import run_command
from benchmarks.gpu.pairs import cut
from benchmarks.launches import Launches, counted_launches
from draft_service.drafter import Drafter
from paceline.engine.attention.common import ATTENTION_NAME
from paceline.engine.loading import as_loaded
from paceline.engine.model.loader import resolve_device
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.files import replace_file
from paceline.measure.synthetic.shapes import SHAPES, ModelShape
from paceline.measure.synthetic.weights import make_config
from paceline.measure.tables import markdown_table
from paceline.measure.traffic import config_traffic, copy_bandwidth
from paceline.types import Proposal, ProposeRow, Verdict, VerifyRow
from target_service.verifier import Verifier

DTYPE = torch.bfloat16
PREFILL_TOKENS = 2048
"""Prompt tokens of a pass, so that long contexts are cached soon."""
PAGE_ROOM = 16
"""Tokens of a row's last page, which may be nearly empty."""


@dataclass(frozen=True)
class HopTime:
    """A call of the verifier, or of the drafter for all its drafts."""

    hop: str
    batch_size: int
    cached_tokens: int
    """Of each row."""
    ms: float
    floor_ms: float
    launches: int | None
    """Kernels and graphs that the host launched; None on a CPU."""
    kernels: int | None
    """Kernels that the device ran."""
    waits: int | None
    """Times that the host waited for the device."""

    @property
    def floor_share(self) -> float:
        return self.floor_ms / self.ms


def main(
    pair: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "qwen3-8b/0.6b",
    device: str = "auto",
    batch_sizes: Annotated[list[int], typer.Option("--batch-size")] = [1, 8, 32],  # noqa: B006 - typer reads it only
    contexts: Annotated[list[int], typer.Option("--cached-tokens", help="Cached tokens of each row.")] = [512],  # noqa: B006
    draft_count: int = 5,
    layers: Annotated[int | None, typer.Option(help="Layers of both models; unset: as many as theirs.")] = None,
    vocabulary_size: Annotated[
        int | None, typer.Option(help="Tokens of both models; unset: as many as theirs.")
    ] = None,
    repeats: int = 20,
    output: Annotated[Path | None, typer.Option(help="File for the figures, as JSON.")] = None,
) -> None:
    """Print a table of verify and propose times, their floors, and how near they are."""
    if pair not in SHAPES:
        raise typer.BadParameter(f"{pair!r} is not one of {', '.join(SHAPES)}", param_hint="--pair")
    place, shape = torch.device(resolve_device(device)), cut(SHAPES[pair], layers, vocabulary_size)
    bandwidth = copy_bandwidth(str(place))
    longest = min(shape.target.max_length, shape.draft.max_length) - draft_count - 1
    cases = [(batch_size, min(context, longest)) for context in contexts for batch_size in batch_sizes]
    found = []
    for hop in (VerifyHop(), ProposeHop()):
        timing = Timing(shape.target if hop.name == "verify" else shape.draft, place, cases, draft_count, repeats)
        found += [timing.measured(hop, bandwidth, *case) for case in cases]
        del timing  # its model, before the next one is made
    rows = [asdict(one) | {"floor_share": one.floor_share} for one in found]
    print(f"{pair}, {place}, {bandwidth / 1e9:.0f} GB/s copied\n{table(found)}")
    if output:
        replace_file(output, json.dumps([row | {"gb_per_s": bandwidth / 1e9} for row in rows], indent=1))


def table(found: list[HopTime]) -> str:
    header = ("hop", "B", "cached", "ms", "floor ms", "of the floor", "launches", "kernels", "waits")
    rows = [
        (
            *(one.hop, str(one.batch_size), str(one.cached_tokens), f"{one.ms:.2f}", f"{one.floor_ms:.2f}"),
            *(f"{one.floor_share:.0%}", *("" if n is None else str(n) for n in (one.launches, one.kernels, one.waits))),
        )
        for one in found
    ]
    return markdown_table(header, rows)


class VerifyHop:
    name = "verify"

    def pass_count(self, draft_count: int) -> int:
        return 1

    def work(self, runner: Runner, batch_size: int, draft_count: int, cached_tokens: int) -> Callable[[], None]:
        """Return a call that verifies drafts of every row."""
        verifier, drafts = Verifier(runner), tuple(range(100, 100 + draft_count))
        rows = [VerifyRow(name_of(number), cached_tokens, (5,), drafts) for number in range(batch_size)]

        def verify() -> None:
            assert all(isinstance(one, Verdict) for one in verifier.verify(rows))

        return verify


class ProposeHop:
    name = "propose"

    def pass_count(self, draft_count: int) -> int:
        return draft_count

    def work(self, runner: Runner, batch_size: int, draft_count: int, cached_tokens: int) -> Callable[[], None]:
        """Return a call that drafts for every row."""
        drafter = Drafter(runner)
        rows = [ProposeRow(name_of(number), cached_tokens, (5,), draft_count) for number in range(batch_size)]

        def propose() -> None:
            assert all(isinstance(one, Proposal) for one in drafter.propose(rows))

        return propose


class Timing:
    """A model in memory, with room for the largest case."""

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device,
        cases: list[tuple[int, int]],
        draft_count: int,
        repeats: int,
    ) -> None:
        self._device, self._draft_count, self._repeats = device, draft_count, repeats
        self._traffic = config_traffic(make_config(shape), DTYPE, DTYPE)
        tokens = max(batch_size * (cached + draft_count + 1 + PAGE_ROOM) for batch_size, cached in cases)
        options = EngineOptions(
            str(tokens * self._traffic.token_bytes), prefix_sharing=False, prefill_chunk_tokens=PREFILL_TOKENS
        )
        self._runner = Runner(random_model(shape, device), options)

    def measured(self, hop: VerifyHop | ProposeHop, bandwidth: float, batch_size: int, cached_tokens: int) -> HopTime:
        fill(self._runner, batch_size, cached_tokens)
        work = hop.work(self._runner, batch_size, self._draft_count, cached_tokens)
        spent_s, launches = timed(work, self._device, self._repeats), Launches(None, None, None)
        if self._device.type == "cuda":
            launches = counted_launches(work)
        self._runner.release(map(name_of, range(batch_size)))
        pass_bytes = self._traffic.weight_bytes + batch_size * cached_tokens * self._traffic.token_bytes
        floor_s = hop.pass_count(self._draft_count) * pass_bytes / bandwidth
        return HopTime(hop.name, batch_size, cached_tokens, 1e3 * spent_s, 1e3 * floor_s, *asdict(launches).values())


def random_model(shape: ModelShape, device: torch.device) -> LoadedModel:
    torch.manual_seed(0)
    with device:
        module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            make_config(shape), dtype=DTYPE, attn_implementation=ATTENTION_NAME
        )
    return as_loaded(module.eval(), shape.family, None)


def name_of(number: int) -> str:
    return f"row-{number}"


def prompt(number: int, count: int, vocabulary_size: int) -> tuple[int, ...]:
    return tuple((number * 7919 + 31 * place) % vocabulary_size for place in range(count))


def fill(runner: Runner, batch_size: int, count: int) -> None:
    """Cache `count` tokens of every row."""
    for number in range(batch_size):
        token_ids = prompt(number, count, runner.limits.vocabulary_size)
        while (length := runner.cache.length(name_of(number))) < count:
            runner.forward([PackedRow(name_of(number), length, token_ids[length:])])


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
    run_command(main)
