"""The stages `rounds-...`: `benchmarks.rounds` at the shapes of real pairs, a process for each case."""

import json
from functools import partial

from benchmarks.gpu.plan import StagePlan
from benchmarks.gpu.stages import Figures, Part

BATCH_SIZES, CONTEXTS = (1, 8, 32), (512, 4096)


def round_parts(plan: StagePlan, pair: str) -> list[Part]:
    batch_sizes, contexts = ((1, 2), (16,)) if plan.small else (BATCH_SIZES, CONTEXTS)
    return [
        Part(f"{context} cached, B = {batch_size}", partial(timed_rounds, plan, pair, context, batch_size))
        for context in contexts
        for batch_size in batch_sizes
    ]


def timed_rounds(plan: StagePlan, pair: str, context: int, batch_size: int) -> list[Figures]:
    name = f"rounds-{pair.replace('/', '-')}-{context}-{batch_size}"
    file = plan.folder / "logs" / f"{name}.json"
    words = ["--pair", pair, "--batch-size", str(batch_size), "--cached-tokens", str(context), "--output", str(file)]
    if plan.layers or plan.small:
        words += ["--layers", str(plan.layers or 1)]
    if plan.small:
        words += ["--vocabulary-size", "4096", "--repeats", "2"]
    plan.command(name, "-m", "benchmarks.rounds", "--device", plan.device, *words)
    found: list[Figures] = json.loads(file.read_text(encoding="utf-8"))
    return found
