"""The stage `serving`: `paceline bench` at the shapes of real pairs, cut to fewer layers, beside Hugging Face."""

import json
from functools import partial

from benchmarks.gpu.pairs import cut, written_pair
from benchmarks.gpu.plan import StagePlan
from benchmarks.gpu.stages import Figures, Part
from paceline.measure.synthetic.shapes import SHAPES, PairShape

PAIRS = ("qwen3-8b/0.6b", "vicuna-7b/68m", "glm4-9b/0.6b")
BATCH_SIZES = (1, 8, 32)
LAYERS = 12
"""Most layers of a model: the systems of a comparison are up together, and a pair is written in a minute."""
ACCEPTANCE = 0.7


def serving_parts(plan: StagePlan) -> list[Part]:
    pairs, batch_sizes = (("100m/5m",), (1, 2)) if plan.small else (PAIRS, BATCH_SIZES)
    return [
        Part(f"{pair}, B = {batch_size}", partial(served, plan, pair, batch_size))
        for pair in pairs
        for batch_size in batch_sizes
    ]


def served(plan: StagePlan, pair: str, batch_size: int) -> list[Figures]:
    """Measure tokens a second of our services and of Hugging Face, in turn."""
    shape = served_shape(plan, pair)
    # A pair that is there is measured as it is, so one with other layers has another name.
    name = f"{pair.replace('/', '-')}-{shape.target.layer_count}"
    folder = written_pair(plan.folder / "pairs" / name, pair, shape, None if plan.small else ACCEPTANCE)
    output = plan.folder / "bench" / f"{name}-{batch_size}"
    extent = ("--max-new-tokens", "128", "--runs", "2", "--kv-memory", "6GiB")
    if plan.small:
        extent = ("--max-new-tokens", "8", "--runs", "1", "--kv-memory", "64MiB")
    assisted = ",hf-assisted" if batch_size == 1 else ""
    plan.command(
        f"serving-{name}-{batch_size}",
        *("-m", "paceline", "bench", "--target-model", str(folder / "target"), "--draft-model", str(folder / "draft")),
        *("--device", plan.device, "--batch-sizes", str(batch_size), "--systems", f"hf{assisted},plain,speculative"),
        *("--draft-counts", "5", "--prompt-count", "2" if plan.small else "24", "--output", str(output), *extent),
    )
    summaries = json.loads((output / "result.json").read_text(encoding="utf-8"))["summaries"]
    return [
        {
            "system": one["system"],
            "layers": shape.target.layer_count,
            "B": one["batch_size"],
            "tokens/s": one["tokens_per_s"],
            "equal": one["equal_count"],
            "of the floor": one["rounds"] and one["rounds"]["floor_share"],
        }
        for one in summaries
    ]


def served_shape(plan: StagePlan, pair: str) -> PairShape:
    return cut(SHAPES[pair], plan.layers or (1 if plan.small else LAYERS))
