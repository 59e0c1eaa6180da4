"""The work and the time of the rounds in one measured pass, from differences of counters."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from paceline.types import ClusterStatistics, DraftSource, SourceUsage, Usage, added_up


@dataclass(frozen=True)
class Counters:
    """A cluster's counters at one moment."""

    statistics: ClusterStatistics
    draft_realignment_s: float
    target_realignment_s: float


@dataclass(frozen=True)
class RowUse:
    """What some requests used of their rounds, and gained."""

    verified_row_count: int = 0
    """Number of rows in verify calls that gave tokens; a chunk of a prompt gives none."""
    committed_count: int = 0
    drafted_count: int = 0
    accepted_count: int = 0
    context_token_count: int = 0
    """Number of cached tokens that all verified rows together attended to."""
    sources: tuple[SourceUsage, ...] = ()
    """Drafted and accepted tokens by source."""

    @property
    def acceptance(self) -> float | None:
        return self.accepted_count / self.drafted_count if self.drafted_count else None

    @property
    def tokens_per_row(self) -> float:
        """Tokens that a generation gains in a round: SpecBench's mean accepted tokens (MAT), 1 in plain decoding."""
        return self.committed_count / self.verified_row_count if self.verified_row_count else 0.0

    def drafted_by(self, source: DraftSource) -> int:
        """Return the number of draft tokens of a source, whatever its model."""
        return sum(one.drafted_count for one in self.sources if one.source is source)

    def __add__(self, other: Self) -> Self:
        sums: dict[str, Any] = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        return type(self)(**sums | {"sources": added_up(sums["sources"])})


def row_use(usages: Sequence[Usage]) -> RowUse:
    return RowUse(
        verified_row_count=sum(one.round_count for one in usages),
        committed_count=sum(one.output_count for one in usages),
        drafted_count=sum(one.drafted_count for one in usages),
        accepted_count=sum(one.accepted_count for one in usages),
        context_token_count=sum(one.round_count * (one.prompt_count + one.output_count // 2) for one in usages),
        sources=added_up(source for one in usages for source in one.sources),
    )


@dataclass(frozen=True)
class RoundUse(RowUse):
    """What a pass used of its rounds, and their time."""

    round_count: int = 0
    slot_count: int = 0
    """Number of rows that the rounds had room for: B each."""
    filled_slot_count: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    wire_s: float = 0.0
    queue_s: float = 0.0
    coordinator_s: float = 0.0
    realignment_s: float = 0.0
    """Seconds of realignment of the dense layout in both services; not part of `draft_s` and `verify_s`."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the rounds by part. Rounds of two lanes overlap, so the sum may exceed the time of the pass."""
        return {
            "draft": self.draft_s,
            "verify": self.verify_s,
            "realignment": self.realignment_s,
            "wire": self.wire_s,
            "queue": self.queue_s,
            "coordinator": self.coordinator_s,
        }

    @property
    def time_shares(self) -> dict[str, float]:
        total = sum(self.seconds.values())
        return {name: spent / total if total else 0.0 for name, spent in self.seconds.items()}

    @property
    def occupancy(self) -> float:
        return self.filled_slot_count / self.slot_count if self.slot_count else 0.0


def rounds_between(before: Counters, after: Counters, usages: Sequence[Usage], batch_size: int) -> RoundUse:
    """Return the use of rounds between two moments; in between only the requests of `usages` may have been answered."""
    old, new = before.statistics, after.statistics
    draft_realigned_s = after.draft_realignment_s - before.draft_realignment_s
    target_realigned_s = after.target_realignment_s - before.target_realignment_s
    round_count = new.round_count - old.round_count
    hops_s = new.propose.total_s + new.verify.total_s - old.propose.total_s - old.verify.total_s
    return RoundUse(
        **vars(row_use(usages)),
        round_count=round_count,
        slot_count=round_count * batch_size,
        filled_slot_count=_filled_slots(new) - _filled_slots(old),
        draft_s=new.propose.executed_s - old.propose.executed_s - draft_realigned_s,
        verify_s=new.verify.executed_s - old.verify.executed_s - target_realigned_s,
        wire_s=new.propose.wire_s + new.verify.wire_s - old.propose.wire_s - old.verify.wire_s,
        queue_s=new.propose.queued_s + new.verify.queued_s - old.propose.queued_s - old.verify.queued_s,
        coordinator_s=new.round_s - old.round_s - hops_s,
        realignment_s=draft_realigned_s + target_realigned_s,
    )


def _filled_slots(statistics: ClusterStatistics) -> int:
    return sum(size * count for size, count in statistics.round_counts_by_group_size)
