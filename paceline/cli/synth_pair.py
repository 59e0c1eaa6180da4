"""`paceline synth-pair`: a pair of random weights of a named shape, for measuring speed without downloads."""

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli.consoles import words_console
from paceline.measure.synthetic.shapes import SHAPES

if TYPE_CHECKING:
    from paceline.measure.synthetic.acceptance import MeasuredAcceptance
    from paceline.measure.synthetic.files import ModelFiles


def command(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")],
    output: Annotated[Path, typer.Option(help="New folder; `target` and `draft` are written into it.")],
    acceptance: Annotated[float, typer.Option(min=0.05, max=0.95, help="Share of drafts to be accepted, of 5.")] = 0.7,
    factor: Annotated[
        float | None, typer.Option(min=0, help="What scales the target's layers; given, nothing is measured.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="What the weights are written in. Unset: float32 for CPU shapes, else bfloat16."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
) -> None:
    """Write a synthetic pair for measuring speed. Its drafts are accepted as often as asked for."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape!r} is not one of {', '.join(SHAPES)}", param_hint="--shape")
    if factor is not None and not isfinite(factor):
        raise typer.BadParameter(f"{factor} scales weights to no numbers; give 0 or more", param_hint="--factor")
    # Imported late: torch is slow to import, and `paceline` runs without it.
    from paceline.measure.synthetic.pair import PairOrder, write_pair

    console = words_console(soft_wrap=True)
    order = PairOrder(shape, SHAPES[shape], output, acceptance, factor, dtype, seed)
    with console.status("making random weights") as status:

        def tell(tried: float, measured: "MeasuredAcceptance") -> None:
            console.print(f"factor {tried:.3f}: {measured.share:.3f} of the drafts accepted", style="dim")
            status.update(f"looking for the factor that gives {acceptance}")

        pair = write_pair(order, tell)
    console.print(f"{output}: synthetic pair of the shape {shape}, factor {pair.factor:.4g}, seed {seed}")
    for role, files in (("target", pair.target), ("draft", pair.draft)):
        console.print(_line(role, files))
    if pair.calibration:
        measured, part = pair.calibration.acceptance, pair.calibration.target
        what = "" if part == SHAPES[shape].target else f", measured with {part.layer_count} layers"
        console.print(
            f"acceptance {measured.share:.3f} over {measured.token_count} tokens{what}; between prompts ±"
            f"{measured.spread:.2f}, first half of outputs {measured.first_half:.2f}, second {measured.second_half:.2f}"
        )


def _line(role: str, files: "ModelFiles") -> str:
    dtype = str(files.dtype).removeprefix("torch.")
    parameters_m = files.total_bytes / files.dtype.itemsize / 1e6
    return f"  {role:7} {parameters_m:,.1f} M parameters, {dtype}, {files.total_bytes / 2**30:.2f} GiB"
