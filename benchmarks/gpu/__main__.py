"""The command of one stage: `python -m benchmarks.gpu STAGE FOLDER`."""

import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.gpu.exactness import exactness_parts
from benchmarks.gpu.kernels import kernel_parts, sanitizer_parts
from benchmarks.gpu.plan import StagePlan
from benchmarks.gpu.round_times import round_parts
from benchmarks.gpu.serving import serving_parts
from benchmarks.gpu.stages import TABLE_FILE, OtherMachine, Part, Stage
from paceline.measure.files import prepare_folder

STAGES: dict[str, Callable[[StagePlan], list[Part]]] = {
    "kernels": kernel_parts,
    "sanitizer": sanitizer_parts,
    "exactness": exactness_parts,
    "rounds-qwen3": partial(round_parts, pair="qwen3-8b/0.6b"),
    "rounds-vicuna": partial(round_parts, pair="vicuna-7b/68m"),
    "rounds-glm4": partial(round_parts, pair="glm4-9b/0.6b"),
    "serving": serving_parts,
}
BEGIN_UNTIL_S = 360.0
"""No part begins later, because `scripts/gpu` ends a stage after nine minutes."""


def main(
    stage: Annotated[str, typer.Argument(help=f"One of {', '.join(STAGES)}.")],
    folder: Annotated[Path, typer.Argument(help="Where results go, and those of an earlier run are.")],
    device: str = "cuda",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Most layers of large models. Unset: see the stage.")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Next to nothing of everything, to try the stage.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Do what was done before, too.")] = False,
) -> None:
    """Do the parts of a stage that have no figures yet. Exit status 1 when some still have none."""
    if stage not in STAGES:
        raise typer.BadParameter(f"{stage!r} is not one of {', '.join(STAGES)}", param_hint="STAGE")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no GPU; --device cpu --small tries the stage", param_hint="--device")
    prepare_folder(folder)
    console = Console(highlight=False, soft_wrap=True)
    plan = StagePlan(folder.resolve(), device, layers, small)
    record = Stage(stage, folder, machine(plan))
    if not again:
        try:
            record.resume()
        except OtherMachine as error:
            raise typer.BadParameter(str(error), param_hint="FOLDER") from error
    parts = STAGES[stage](plan)
    whole = record.run(parts, lambda words: console.print(words, markup=False), BEGIN_UNTIL_S)
    console.print(f"{record.file}, {folder / TABLE_FILE}", markup=False)
    raise typer.Exit(0 if whole else 1)


def machine(plan: StagePlan) -> dict[str, str]:
    """Return what figures depend on beside the code, in words: the machine, and what is left out."""
    on_gpu = plan.device.startswith("cuda")
    name = torch.cuda.get_device_name(torch.device(plan.device)) if on_gpu else platform.machine()
    versions = {one: f"{one} {version(one)}" for one in ("torch", "transformers", "triton")}
    cut = {"layers": f"at most {plan.layers} layers"} if plan.layers else {}
    trial = {"extent": "a trial with next to nothing"} if plan.small else {}
    return {"device": name} | versions | cut | trial


if __name__ == "__main__":
    run_command(main)
