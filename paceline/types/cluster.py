"""What a coordinator says of itself and its rounds."""

from dataclasses import dataclass

from paceline.types.models import ModelDescription
from paceline.types.rounds import HopTime


@dataclass(frozen=True, slots=True)
class ClusterStatistics:
    """What a coordinator's rounds have done since it started."""

    round_count: int = 0
    fallback_round_count: int = 0
    """Rounds for which the policy found no group of the kind it looks for."""
    drafted_count: int = 0
    accepted_count: int = 0
    committed_count: int = 0
    accepted_counts_by_position: tuple[int, ...] = ()
    """How often the first, second, ... draft of a row was accepted."""
    round_counts_by_group_size: tuple[tuple[int, int], ...] = ()
    occupancy_while_waiting: float = 1.0
    """Share of filled slots in rounds that began while other sequences waited."""
    preemption_count: int = 0
    round_s: float = 0.0
    """Seconds of all rounds; what is in neither hop is the coordinator's own. Two lanes' rounds overlap."""
    propose: HopTime = HopTime()
    verify: HopTime = HopTime()


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    target: ModelDescription
    draft: ModelDescription
    batch_size: int
    draft_count: int | None
    """None: chosen round by round."""
    policy: str
    lane_count: int
    live_sequence_count: int
    waiting_sequence_count: int
    statistics: ClusterStatistics
