"""The search, by bisection, for the factor at which the wanted share of drafts is accepted.

In each trial the target writes greedily after random prompts, and the draft makes its choice at every position of that
text. Of large models a part is tried, with fewer layers and only the tokens that outputs have. The factor stands for
all layers together (`weights`), so it carries over, except for effects of depth itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from paceline.errors import InvalidRequest
from paceline.measure.synthetic.acceptance import MeasuredAcceptance, measure
from paceline.measure.synthetic.seeds import generator
from paceline.measure.synthetic.shapes import ModelShape, PairShape
from paceline.measure.synthetic.successors import Successors
from paceline.measure.synthetic.weights import Recipe, make_module, parameter_count, scale_additions

PROMPT_TOKENS = 16
OUTPUT_TOKENS = 128
PROMPT_COUNT = 48
FACTORS = (1.0, 16.0)
"""Factors at which drafts are nearly always right and nearly never right, at every shape."""
TRIALS = 8
CLOSE = 0.01
"""Difference from the wanted share that ends the search; chance alone causes as much."""
FAR = 0.05
"""Difference at which the wanted share counts as out of reach."""
DRAFT_FACTOR = 0.1
"""Factor of the draft's own layers, which then work but change next to nothing."""


@dataclass(frozen=True)
class Calibration:
    factor: float
    acceptance: MeasuredAcceptance
    """Acceptance over other prompts than those of the search."""
    target: ModelShape
    """Shape that was measured: the target's own, or that of a part of it."""


class Trial:
    """A pair in memory whose factor can be changed."""

    def __init__(self, shape: PairShape, successors: Successors) -> None:
        self._successors = successors
        self._target = make_module(Recipe("target", shape.target, successors, 1.0))
        self._draft = make_module(Recipe("draft", shape.draft, successors, DRAFT_FACTOR))
        self._factor = 1.0

    @torch.inference_mode()
    def acceptance(self, factor: float, purpose: str) -> MeasuredAcceptance:
        """Measure at this factor; `purpose` names the prompts."""
        scale_additions(self._target, factor / self._factor)
        self._factor = factor
        prompts = self._prompts(purpose)
        text = self._target.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=OUTPUT_TOKENS
        )
        choices = self._draft(text[:, :-1]).logits[:, PROMPT_TOKENS - 1 :].argmax(dim=-1)
        return measure((choices == text[:, PROMPT_TOKENS:]).tolist())

    def _prompts(self, purpose: str) -> torch.Tensor:
        random = generator(self._successors.seed, "prompts", purpose)
        places = torch.randint(self._successors.count, (PROMPT_COUNT, PROMPT_TOKENS), generator=random)
        return self._successors.token_ids[places]


def calibrate(
    shape: PairShape, successors: Successors, wanted: float, tell: Callable[[float, MeasuredAcceptance], None]
) -> Calibration:
    """Bisect for the acceptance `wanted`, and tell each trial. Raise InvalidRequest when no factor gives it."""
    trial = Trial(shape, successors)
    low, high = FACTORS
    tried: dict[float, float] = {}
    for _ in range(TRIALS):
        factor = math.sqrt(low * high)
        measured = trial.acceptance(factor, "bisection")
        tell(factor, measured)
        tried[factor] = measured.share - wanted
        if abs(tried[factor]) <= CLOSE:
            break
        low, high = (factor, high) if tried[factor] > 0 else (low, factor)
    best = min(tried, key=lambda one: abs(tried[one]))
    if abs(tried[best]) > FAR:
        raise InvalidRequest(
            f"--acceptance {wanted}: the nearest this shape comes is {wanted + tried[best]:.2f}; ask for that, or take "
            "a wider shape",
            field="acceptance",
        )
    return Calibration(best, trial.acceptance(best, "verification"), shape.target)


def calibration_bytes(shape: PairShape) -> int:
    """Return the bytes of memory to measure a pair of this shape: the weights in float32, and as much to work with."""
    return 2 * 4 * (parameter_count(shape.target) + parameter_count(shape.draft))


def part_of(shape: PairShape, layer_count: int, vocabulary_size: int) -> PairShape:
    """Return the pair's shape with fewer layers and tokens."""

    def cut(model: ModelShape) -> ModelShape:
        return replace(model, layer_count=min(model.layer_count, layer_count), vocabulary_size=vocabulary_size)

    return replace(shape, target=cut(shape.target), draft=cut(shape.draft))
