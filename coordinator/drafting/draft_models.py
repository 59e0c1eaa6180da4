"""All draft services: those of one model are one drafter, and several models can be asked side by side.

Owns which replica serves which model. A replica that comes back with another model leaves its old one. A model that no
replica has any more is forgotten, or names of models would add up.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coordinator.drafting.guarded_draft import GuardedDraft
from coordinator.drafting.prepared import PreparedDrafter
from coordinator.drafting.replicated_drafter import ReplicatedDrafter
from coordinator.protocols import Drafter, RemoteDraft
from coordinator.replicas.replica import Replica
from paceline.errors import PacelineError
from paceline.types import CircuitState, ModelDescription, ReplicaDescription


@dataclass(frozen=True)
class _Model:
    replicas: ReplicatedDrafter
    drafter: PreparedDrafter
    """Those replicas as they are asked."""


class DraftModels:
    def __init__(
        self,
        guard: Callable[[Replica[RemoteDraft]], GuardedDraft],
        wrap: Callable[[ReplicatedDrafter], PreparedDrafter],
    ) -> None:
        """`wrap` returns what is asked in place of the replicas of one model, each behind its `guard`."""
        self._guard = guard
        self._wrap = wrap
        self._models: dict[str, _Model] = {}
        self._places: dict[str, str] = {}
        """Model of each replica, by its address."""
        self._unknown: dict[str, Replica[RemoteDraft]] = {}
        """Replicas that have not said yet which model they serve."""
        self._left_row_count = self._left_hit_count = 0
        """Prepared rows and hits of models that are forgotten."""

    @property
    def usable(self) -> Mapping[str, Drafter]:
        """Drafters that can be asked now, by their model."""
        return {model: one.drafter for model, one in self._models.items() if one.replicas.max_length}

    @property
    def is_healthy(self) -> bool:
        """Whether there is a replica whose calls go well."""
        return any(one.replicas.is_healthy for one in self._models.values())

    @property
    def description(self) -> ModelDescription | None:
        """Description of one replica, preferably one that is up; None without any."""
        models = sorted(self._models.values(), key=lambda one: not one.replicas.is_usable)
        return next((one.replicas.description for one in models), None)

    @property
    def prepared_row_count(self) -> int:
        """Rows that drafts were prepared for."""
        return sum((one.drafter.row_count for one in self._models.values()), self._left_row_count)

    @property
    def prepared_hit_count(self) -> int:
        """Those that had their drafts without a call."""
        return sum((one.drafter.hit_count for one in self._models.values()), self._left_hit_count)

    def describe(self) -> list[ReplicaDescription]:
        unknown = [one.described(0, CircuitState.CLOSED) for one in self._unknown.values()]
        return [*(found for one in self._models.values() for found in one.replicas.describe()), *unknown]

    def changed(self, replica: Replica[RemoteDraft]) -> None:
        """Take in a replica that is new or whose state or model changed."""
        before = self._places.get(replica.address)
        model = replica.description.model_id if replica.description else before
        if model is None:
            self._unknown[replica.address] = replica
            return
        self._unknown.pop(replica.address, None)
        self._places[replica.address] = model
        if before is not None and model != before:
            self._leave(replica, before)
        if model not in self._models:
            replicas = ReplicatedDrafter(self._guard)
            self._models[model] = _Model(replicas, self._wrap(replicas))
        self._models[model].replicas.changed(replica)

    def left(self, replica: Replica[RemoteDraft]) -> None:
        """Forget a replica that is gone."""
        self._unknown.pop(replica.address, None)
        if model := self._places.pop(replica.address, None):
            self._leave(replica, model)

    def _leave(self, replica: Replica[RemoteDraft], model: str) -> None:
        one = self._models[model]
        one.replicas.left(replica)
        if model not in self._places.values():
            del self._models[model]
            self._left_row_count += one.drafter.row_count
            self._left_hit_count += one.drafter.hit_count

    def lacks(self, model: str) -> bool:
        """Return whether all draft services are known, and none of them has this model."""
        return bool(self._places) and not self._unknown and model not in self._places.values()

    def look_anew(self, reason: PacelineError) -> None:
        """Ask no replica before it was looked at again."""
        for one in self._models.values():
            one.replicas.look_anew(reason)

    def owe(self, sequence_ids: list[str]) -> None:
        """Leave sequences to be freed wherever they are."""
        for one in self._models.values():
            one.drafter.owe(sequence_ids)

    async def release(self) -> int:
        return sum(await asyncio.gather(*(one.drafter.release() for one in self._models.values())))
