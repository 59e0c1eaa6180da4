"""The stage `exactness`: `paceline equivalence` for small pairs of every family, by real services."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.pairs import FAMILIES, written_pair
from benchmarks.gpu.plan import StagePlan
from benchmarks.gpu.stages import Figures, Part, PartFailed

BUILT_IN = "built-in"
PRECISIONS = ("float32", "bfloat16-strict")


def exactness_parts(plan: StagePlan) -> list[Part]:
    return [
        Part(f"{pair}, {precision}", partial(compared, plan, pair, precision))
        for pair in (BUILT_IN, *FAMILIES)
        for precision in PRECISIONS
    ]


def compared(plan: StagePlan, pair: str, precision: str) -> Sequence[Figures]:
    """Compare outputs with plain decoding's, and in float32 with Hugging Face's. Raise PartFailed for a difference."""
    models = ("builtin:target", "builtin:draft")
    if pair != BUILT_IN:
        folder = written_pair(plan.folder / "pairs" / pair, pair, FAMILIES[pair])
        models = (str(folder / "target"), str(folder / "draft"))
    output = plan.folder / "equivalence" / f"{pair}-{precision}"
    extent = ("--batch-sizes", "1,2", "--max-new-tokens", "8", "--prompt-count", "2")
    if not plan.small:
        extent = ("--batch-sizes", "1,8,32", "--max-new-tokens", "64", "--prompt-count", "24")
    words = ("--target-model", models[0], "--draft-model", models[1], "--device", plan.device, "--output", str(output))
    chosen = ("--dtypes", precision, "--policies", "continuous", "--draft-count", "5")
    name = f"exactness-{pair}-{precision}"
    failure: PartFailed | None = None
    try:
        plan.command(name, "-m", "paceline", "equivalence", *words, *chosen, *extent)
    except PartFailed as error:
        failure = error
    # A difference is an exit status too, and the file says more of it than the log's end does.
    found = agreements(output / "equivalence.json")
    if wrong := [one for one in found if one["must be equal"] == "NO"]:
        raise PartFailed("; ".join(f"{one['outputs of']} at B = {one['B']}: {one['equal']} equal" for one in wrong))
    if failure:
        raise failure
    return found


def agreements(file: Path) -> list[Figures]:
    if not file.exists():
        return []
    known: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["agreements"]
    return [_agreement(one) for one in known]


def _agreement(one: dict[str, Any]) -> Figures:
    count = sum(rates["prompt_count"] for rates in one["rates"])
    must = ("NO" if one["mismatches"] else "yes") if one["must_hold"] else ""
    return {
        "outputs of": one["system"],
        "B": one["batch_size"],
        "beside": one["reference"],
        "equal": f"{count - len(one['mismatches'])} of {count}",
        "must be equal": must,
    }
