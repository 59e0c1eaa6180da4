"""A grid of drafts by depth and training tokens, one recipe for all: the points that laws of drafts are fitted to.

Each cell is a file, so a grid that was interrupted goes on, and several processes can each make some of the cells.
Beside its point a cell keeps its draft, ready to be served. Acceptance is counted where a draft is asked: at each
position of the target's own outputs that no draft has learnt, whether its choice is the target's.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from paceline.errors import InvalidRequest
from paceline.laws.points import Point, read_points, write_points
from training import draft
from training.lessons import Lesson
from training.loop import MAX_LENGTH, bucketed, fit, new_model, placed, save
from training.outputs import Output, output_places, padded
from training.tokenizer import save_tokenizer

DEPTHS = (1, 2, 3, 5)
TOKEN_COUNTS = (500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000)
HELD_OUT = ((3, 2_000_000), (2, 4_000_000))
"""Depths and tokens of cells that laws are compared with."""
STEP_TOKENS = 2048
"""Tokens of a step of training: few, so that the smallest cell has some hundred steps."""
PEAK_RATE = 4e-3
TIMED_STEPS = 31


@dataclass(frozen=True)
class Cell:
    depth: int
    token_count: int

    def point_file(self, folder: Path) -> Path:
        return folder / f"{self._name}.json"

    def draft_folder(self, folder: Path) -> Path:
        return folder / self._name

    @property
    def _name(self) -> str:
        return f"depth-{self.depth}-tokens-{self.token_count}"


def cells(depths: Sequence[int], token_counts: Sequence[int]) -> list[Cell]:
    """Return the cells, the cheapest first."""
    found = [Cell(depth, count) for depth in depths for count in token_counts]
    return sorted(found, key=lambda one: one.depth * one.token_count)


def cells_named(names: str) -> frozenset[Cell]:
    """Read cells written as `3:2000000,2:4000000`. Raise InvalidRequest."""
    pairs = [one.partition(":") for one in names.split(",") if one]
    if wrong := [one for one in pairs if not (one[0].isdecimal() and one[2].isdecimal())]:
        raise InvalidRequest(
            f"there is no cell {''.join(wrong[0])!r}; give cells as DEPTH:TOKENS, with commas between them"
        )
    return frozenset(Cell(int(depth), int(token_count)) for depth, _, token_count in pairs)


@dataclass(frozen=True)
class Recipe:
    """What all cells share."""

    lessons: Sequence[Lesson]
    held: Sequence[Output]
    """Outputs that acceptance is counted on."""
    tokenizer: Tokenizer
    seed: int
    device: str
    """auto, cpu or cuda"""
    report: Callable[[str], None]

    def point(self, cell: Cell, folder: Path) -> Point:
        """Train a draft, measure it and store it."""
        torch.manual_seed(self.seed)
        shape = replace(draft.DRAFT_SHAPE, layer_count=cell.depth)
        model = placed(new_model(shape, self.tokenizer.get_vocab()), self.device)
        began_s = time.perf_counter()
        progress = fit(
            model,
            draft.batches(self.lessons, STEP_TOKENS, self.seed),
            draft.distillation_loss,
            most_tokens=cell.token_count,
            peak_rate=PEAK_RATE,
            report=self.report,
        )
        train_s = time.perf_counter() - began_s
        share = right_share(model, self.held)
        step_s = _step_s(model.cpu())
        save_tokenizer(self.tokenizer, cell.draft_folder(folder), MAX_LENGTH)
        save(model, progress, cell.draft_folder(folder))
        return Point(cell.depth, progress.token_count, share, train_s, step_s)


def made_points(
    folder: Path, wanted: Sequence[Cell], held_out: frozenset[Cell], recipe: Callable[[], Recipe]
) -> list[Point]:
    """Make the cells that are not there yet, and return the points of all; a recipe is asked for only if one lacks.

    What is held out may differ from call to call: cells that are there already were made in the same way.
    """
    missing = [one for one in wanted if not one.point_file(folder).exists()]
    if missing:
        made = recipe()
        for cell in missing:
            point = made.point(cell, folder)
            write_points(cell.point_file(folder), [point])
            made.report(f"depth {cell.depth}, {point.token_count} tokens: {point.acceptance:.3f} right")
    return [replace(point, held_out=one in held_out) for one in wanted for point in read_points(one.point_file(folder))]


@torch.no_grad()
def right_share(model: LlamaForCausalLM, held: Sequence[Output]) -> float:
    """Return the share of output positions at which the draft's choice is the target's."""
    right = asked = 0
    for batch in bucketed(held, 8192, random.Random(0)):
        tokens = padded([one.token_ids for one in batch]).clamp_min(0).to(model.device)
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        places = output_places(batch).to(model.device)
        chosen = model.lm_head(hidden.index_select(0, places)).argmax(-1)
        right += int((chosen == tokens.flatten()[places + 1]).sum())
        asked += len(places)
    return right / asked


@torch.no_grad()
def _step_s(model: LlamaForCausalLM) -> float:
    """Return the seconds of a pass over one token on a CPU: by them depths are compared, and not machines."""
    token, times_s = torch.zeros(1, 1, dtype=torch.long), []
    for _ in range(TIMED_STEPS):
        began_s = time.perf_counter()
        model(input_ids=token)
        times_s.append(time.perf_counter() - began_s)
    return median(times_s)
