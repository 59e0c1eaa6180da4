"""Making of a synthetic pair, from its shape to its folder. See `successors` for how and why it works."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.builtin import resolve_model
from paceline.engine.model.loader import DTYPES
from paceline.errors import InvalidRequest
from paceline.files import replace_file, replacing
from paceline.measure.synthetic.acceptance import DRAFT_COUNT, MeasuredAcceptance
from paceline.measure.synthetic.calibration import DRAFT_FACTOR, Calibration, calibrate, calibration_bytes, part_of
from paceline.measure.synthetic.files import ModelFiles, check_memory, check_room, plan_files, write_model
from paceline.measure.synthetic.shapes import PairShape
from paceline.measure.synthetic.successors import Successors, draw_successors
from paceline.measure.synthetic.weights import Recipe, parameter_count

WHOLE_PARAMETERS = 500_000_000
"""Most parameters of a target that is measured whole; of a larger target a part is measured."""
PART_LAYERS = 2


@dataclass(frozen=True)
class PairOrder:
    name: str
    shape: PairShape
    output: Path
    acceptance: float = 0.7
    factor: float | None = None
    """Factor to use without measuring; None to search for it."""
    dtype: str | None = None
    """Dtype of the weights; None for the shape's own."""
    seed: int = 0


@dataclass(frozen=True)
class WrittenPair:
    target: ModelFiles
    draft: ModelFiles
    factor: float
    calibration: Calibration | None


def write_pair(order: PairOrder, tell: Callable[[float, MeasuredAcceptance], None]) -> WrittenPair:
    """Find the factor, tell each trial, and write `target` and `draft` under `order.output`.

    Raise InvalidRequest when the folder is not empty, disk or memory is short, or the acceptance cannot be had.
    """
    dtype = DTYPES[order.dtype or order.shape.dtype]
    models = plan_files(order.shape.target, dtype), plan_files(order.shape.draft, dtype)
    _prepare(order.output)
    check_room(order.output, list(models))
    token_ids, has_tokenizer = output_token_ids(order.shape)
    successors = draw_successors(token_ids, order.seed)
    calibration = None if order.factor is not None else _calibrate(order, successors, tell)
    factor = calibration.factor if calibration else order.factor
    assert factor is not None
    label = _label(order, factor, calibration)
    recipes = (
        Recipe("target", order.shape.target, successors, factor, dtype),
        Recipe("draft", order.shape.draft, successors, DRAFT_FACTOR, dtype),
    )
    for files, recipe in zip(models, recipes, strict=True):
        with replacing(order.output / recipe.role) as folder:
            write_model(folder, files, recipe, label, with_tokenizer=has_tokenizer)
    replace_file(order.output / "MODEL_CARD.md", _card(order, label))
    return WrittenPair(*models, factor, calibration)


def _prepare(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise InvalidRequest(f"--output {output} is not empty; give a new folder", field="output")
    except OSError as error:
        raise InvalidRequest(f"--output {output} cannot be written: {error}", field="output") from error


def output_token_ids(shape: PairShape) -> tuple[list[int], bool]:
    """Return the tokens that outputs may have, and whether the pair gets the built-in pair's tokenizer.

    With the tokenizer these are its ordinary tokens, so that every output has text.
    """
    tokenizer = Tokenizer.from_file(str(resolve_model("builtin:target") / "tokenizer.json"))
    if tokenizer.get_vocab_size() > shape.target.vocabulary_size:
        return list(range(shape.target.vocabulary_size)), False
    special = tokenizer.get_added_tokens_decoder()
    return [one for one in range(tokenizer.get_vocab_size()) if one not in special], True


def _calibrate(
    order: PairOrder, successors: Successors, tell: Callable[[float, MeasuredAcceptance], None]
) -> Calibration:
    shape = order.shape
    if parameter_count(shape.target) > WHOLE_PARAMETERS:
        shape = part_of(shape, PART_LAYERS, int(successors.token_ids.max()) + 1)
    check_memory("measuring acceptance", calibration_bytes(shape))
    return calibrate(shape, successors, order.acceptance, tell)


def _label(order: PairOrder, factor: float, calibration: Calibration | None) -> dict[str, Any]:
    """Return the facts that the pair's configurations and model card state."""
    label: dict[str, Any] = {
        "note": "random weights made for measuring speed; not a language model",
        "shape": order.name,
        "seed": order.seed,
        "factor": factor,
    }
    if calibration:
        label |= {"wanted_acceptance": order.acceptance, "measured_acceptance": asdict(calibration.acceptance)}
        label["measured_with"] = {
            "layers": calibration.target.layer_count,
            "vocabulary": calibration.target.vocabulary_size,
            "drafts_per_round": DRAFT_COUNT,
        }
    return label


def _card(order: PairOrder, label: dict[str, Any]) -> str:
    sizes = {role: parameter_count(shape) / 1e6 for role, shape in vars(order.shape).items() if role != "dtype"}
    return (
        f"# A synthetic pair of the shape {order.name}\n\n"
        f"Random weights made by `paceline synth-pair` for measuring speed. This is no language model: its text means\n"
        f"nothing. Target {sizes['target']:.0f} M parameters, draft {sizes['draft']:.0f} M.\n\n"
        f"```json\n{json.dumps(label, indent=2)}\n```\n"
    )
