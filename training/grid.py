"""A grid of drafts by depth and training tokens, one recipe for all: the points that laws of drafts are fitted to.

Each cell is a file, so a grid that was interrupted goes on. Acceptance is counted where a draft is asked: at each
position of the target's own outputs that no draft has learnt, whether its choice is the target's.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaForCausalLM

from paceline.laws.points import Point, read_points, write_points
from training import draft
from training.loop import bucketed, fit, new_model
from training.outputs import Lesson, Output, padded

DEPTHS = (1, 2, 3, 5)
TOKEN_COUNTS = (500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000)
HELD_OUT = frozenset({(3, 2_000_000), (2, 4_000_000)})
"""Cells that laws are compared with."""
STEP_TOKENS = 1024
"""Tokens of a step of training: few, so that the smallest cell has some hundred steps."""
PEAK_RATE = 4e-3
TIMED_STEPS = 31


@dataclass(frozen=True)
class Cell:
    depth: int
    token_count: int

    def path(self, folder: Path) -> Path:
        return folder / f"depth-{self.depth}-tokens-{self.token_count}.json"


def cells(depths: Sequence[int], token_counts: Sequence[int]) -> list[Cell]:
    """Return the cells, the cheapest first."""
    found = [Cell(depth, count) for depth in depths for count in token_counts]
    return sorted(found, key=lambda one: one.depth * one.token_count)


@dataclass(frozen=True)
class Recipe:
    """What all cells share."""

    lessons: Sequence[Lesson]
    held: Sequence[Output]
    """Outputs that acceptance is counted on."""
    vocabulary: dict[str, int]
    seed: int
    report: Callable[[str], None]

    def point(self, cell: Cell) -> Point:
        """Train a draft and measure it."""
        torch.manual_seed(self.seed)
        model = new_model(replace(draft.DRAFT_SHAPE, layer_count=cell.depth), self.vocabulary)
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
        is_held_out = (cell.depth, cell.token_count) in HELD_OUT
        share = right_share(model, self.held)
        return Point(cell.depth, progress.token_count, share, train_s, _step_s(model), is_held_out)


def made_points(folder: Path, wanted: Sequence[Cell], recipe: Callable[[], Recipe]) -> list[Point]:
    """Make the cells that are not there yet, and return the points of all; a recipe is asked for only if one lacks."""
    missing = [one for one in wanted if not one.path(folder).exists()]
    if missing:
        made = recipe()
        for cell in missing:
            point = made.point(cell)
            write_points(cell.path(folder), [point])
            made.report(f"depth {cell.depth}, {point.token_count} tokens: {point.acceptance:.3f} right")
    return [point for one in wanted for point in read_points(one.path(folder))]


@torch.no_grad()
def right_share(model: LlamaForCausalLM, held: Sequence[Output]) -> float:
    """Return the share of output positions at which the draft's choice is the target's."""
    right = asked = 0
    for batch in bucketed(held, 8192, random.Random(0)):
        logits = model(input_ids=padded([one.token_ids for one in batch]).clamp_min(0)).logits
        for output, row in zip(batch, logits, strict=True):
            chosen = row[output.prompt_count - 1 : len(output) - 1].argmax(-1)
            truth = torch.tensor(output.token_ids[output.prompt_count :])
            right += int((chosen == truth).sum())
            asked += len(truth)
    return right / asked


@torch.no_grad()
def _step_s(model: LlamaForCausalLM) -> float:
    """Return the seconds of a pass over one token: by them depths are compared, and not machines."""
    token, times_s = torch.zeros(1, 1, dtype=torch.long), []
    for _ in range(TIMED_STEPS):
        began_s = time.perf_counter()
        model(input_ids=token)
        times_s.append(time.perf_counter() - began_s)
    return median(times_s)
