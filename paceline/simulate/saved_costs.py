"""Costs that a cluster measured, saved in a file with the settings that they were measured with."""

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from paceline.checks import MAX_DRAFT_COUNT, MOST_LANES
from paceline.errors import InvalidRequest, StartupError
from paceline.files import replace_file
from paceline.types import AcceptanceCounts, CallCosts, ClusterDescription, MeasuredCosts, ModelDescription

LARGEST = 1e15
"""Of a number in a file: beyond it sums lose what they add."""


def _possible(costs: MeasuredCosts) -> MeasuredCosts:
    """Raise ValueError for costs that no cluster measures: a file may have been written by hand."""
    if not costs.calls_of():
        raise ValueError("no calls to a target")
    if wrong := [one for one in costs.calls if not _is_possible_call(one)]:
        raise ValueError(
            f"{wrong[0]} cannot be: calls are counted from 1, and seconds are finite, and not below 0; "
            f"no number is above {LARGEST:g}"
        )
    if odd := [one for one in costs.acceptances if not _is_possible_acceptance(one)]:
        raise ValueError(f"{odd[0]} cannot be: each place is compared at least once, and right no more often")
    return costs


def _is_possible_call(one: CallCosts) -> bool:
    _, *numbers = astuple(one)
    return one.call_count >= 1 and all(0 <= number <= LARGEST for number in numbers)


def _is_possible_acceptance(one: AcceptanceCounts) -> bool:
    return (
        len(one.compared_counts) == len(one.right_counts)
        and all(0 <= right <= most for right, most in zip(one.right_counts, one.compared_counts, strict=True))
        and all(1 <= most <= LARGEST for most in one.compared_counts)
        and 0 <= one.output_deviation <= 1
    )


@dataclass(frozen=True)
class SavedModel:
    """What a simulation has to know of a model."""

    model_id: str
    token_bytes: Annotated[int, Field(ge=0, le=LARGEST)]
    """Bytes of a token's keys and values."""
    prefill_chunk_tokens: Annotated[int, Field(ge=0, le=LARGEST)]

    @classmethod
    def of(cls, model: ModelDescription) -> "SavedModel":
        return cls(model.model_id, model.cache.token_bytes, model.cache.prefill_chunk_tokens)


@dataclass(frozen=True)
class SavedCosts:
    target: SavedModel
    draft: SavedModel | None
    batch_size: Annotated[int, Field(ge=1)]
    lane_count: Annotated[int, Field(ge=1, le=MOST_LANES)]
    draft_count: Annotated[int, Field(ge=0, le=MAX_DRAFT_COUNT)] | None
    """None: chosen round by round."""
    costs: Annotated[MeasuredCosts, AfterValidator(_possible)]

    @property
    def draft_counts(self) -> list[int]:
        """Draft counts whose verification was measured; what others cost can be foreseen from two or more."""
        return sorted({one.step_count for one in self.costs.calls_of() if one.step_count})

    @classmethod
    def of(cls, cluster: ClusterDescription) -> "SavedCosts":
        """Take the costs out of a description. Raise InvalidRequest where none were measured."""
        if cluster.costs is None:
            raise InvalidRequest("the coordinator tells no costs: it is older than this command; upgrade it")
        if not cluster.costs.calls_of():
            raise InvalidRequest("the coordinator ran no round yet, so nothing is known of costs; send it requests")
        draft = SavedModel.of(cluster.draft) if cluster.draft else None
        target, count = SavedModel.of(cluster.target), cluster.draft_count
        return cls(target, draft, cluster.batch_size, cluster.lane_count, count, cluster.costs)


_FORM = TypeAdapter(SavedCosts)


def write_costs(path: Path, saved: SavedCosts) -> None:
    replace_file(path, _FORM.dump_json(saved, indent=2).decode() + "\n")


def read_costs(path: Path) -> SavedCosts:
    """Raise StartupError where the file is not what `write_costs` writes."""
    try:
        return _FORM.validate_json(path.read_bytes())
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}; name a file that --save-costs wrote") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise StartupError(f"{path} has no costs: {place}: {first['msg']}; give what --save-costs wrote") from error
