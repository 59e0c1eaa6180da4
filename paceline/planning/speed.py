"""How long rounds take and how many tokens they give: by measured costs, or by the least that a machine needs.

It knows nothing of budgets.
"""

from dataclasses import dataclass
from typing import Protocol

from paceline.planning.dimensions import ModelDimensions
from paceline.planning.memory import WeightForm, product_bytes, token_bytes


def expected_tokens(acceptance: float, draft_count: int) -> float:
    """Return the tokens that a row gets in a round; `acceptance` is a draft's chance once those before are accepted."""
    return sum(acceptance**place for place in range(draft_count + 1))


class RoundCosts(Protocol):
    @property
    def origin(self) -> str:
        """Say in words where the costs are from."""
        ...

    def verify_s(self, row_count: int, draft_count: int, length: int) -> float:
        """Return the seconds of a verify of rows with so many drafts each, over `length` cached tokens each."""
        ...

    def draft_s(self, row_count: int, draft_count: int, length: int) -> float:
        """Return the seconds in which the rows get so many drafts each."""
        ...

    def prompt_s(self, token_count: int, pass_count: int) -> float:
        """Return the seconds of both models for so many tokens of prompts in so many passes."""
        ...


@dataclass(frozen=True)
class Machine:
    """What a device can do at most."""

    bandwidth_gb_s: float
    """Reading of memory, in 10^9 bytes a second."""
    tflop_s: float
    """Multiplications and additions, in 10^12 a second."""


MACHINES = {"cpu": Machine(20.0, 0.2), "cuda": Machine(3350.0, 400.0)}
"""Two cores of a server, and one H100: what is taken where nothing else is said."""


@dataclass(frozen=True)
class ModelWork:
    """What a pass of a model reads and multiplies."""

    weights_bytes: float
    token_bytes: float
    """Keys and values of a cached token."""
    parameter_count: float
    """Numbers that each token is multiplied by."""

    @staticmethod
    def of(model: ModelDimensions, form: WeightForm) -> "ModelWork":
        multiplied = model.layer_count * model.layer_product_count + model.embedding_count
        return ModelWork(product_bytes(model, form), token_bytes(model, form), multiplied)


@dataclass(frozen=True)
class FloorCosts:
    """The least that rounds take: each pass reads weights and cache once, and multiplies for each token."""

    target: ModelWork
    draft: ModelWork | None
    heads: ModelWork | None
    """A step of the heads, with the target's head."""
    machine: Machine

    @property
    def origin(self) -> str:
        at = self.machine
        return f"the floor at {at.bandwidth_gb_s:g} GB/s and {at.tflop_s:g} TFLOP/s; real rounds take longer"

    def verify_s(self, row_count: int, draft_count: int, length: int) -> float:
        return self._pass_s(self.target, row_count * (draft_count + 1), row_count * length)

    def draft_s(self, row_count: int, draft_count: int, length: int) -> float:
        if self.heads:
            return draft_count * self._pass_s(self.heads, row_count, 0)
        return draft_count * self._pass_s(self.draft, row_count, row_count * length) if self.draft else 0.0

    def prompt_s(self, token_count: int, pass_count: int) -> float:
        models = [one for one in (self.target, self.draft) if one]
        tokens = token_count / max(1, pass_count)
        return sum(pass_count * self._pass_s(one, tokens, 0) for one in models)

    def _pass_s(self, model: ModelWork, tokens: float, cached_tokens: float) -> float:
        read = model.weights_bytes + cached_tokens * model.token_bytes
        multiplied = 2 * model.parameter_count * tokens
        return max(read / (1e9 * self.machine.bandwidth_gb_s), multiplied / (1e12 * self.machine.tflop_s))
