"""What a coordinator says of itself and its rounds."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from paceline.types.models import ModelDescription
from paceline.types.rounds import HopTime

PolicyName = Literal["continuous", "eqspec", "exspec"]
"""What commands and settings offer; the coordinator's table of policies has one of each."""
PAPER_POLICIES: frozenset[str] = frozenset({"eqspec", "exspec"})
"""Those of *Batch Speculative Decoding Done Right*: they run in one lane, and are measured with the dense layout."""


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


class ReplicaState(Enum):
    UNSPECIFIED = "unspecified"
    """One that this version does not know."""
    UP = "up"
    DRAINING = "draining"
    """It answers, but wants nothing new, or no name leads to it any more: what it has moves away."""
    DOWN = "down"
    REFUSED = "refused"
    """Its model is not one that this coordinator can work with."""


class CircuitState(Enum):
    UNSPECIFIED = "unspecified"
    """One that this version does not know."""
    CLOSED = "closed"
    """Calls go through."""
    OPEN = "open"
    """No calls: they would only be waited for."""
    HALF_OPEN = "half_open"
    """One call is under way to see whether the service works again."""


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """A replica of a model service as its coordinator sees it."""

    address: str
    state: ReplicaState
    sequence_count: int
    """Sequences of this coordinator that were placed on it."""
    circuit: CircuitState | None = None
    """None: an older coordinator told of drafts' only."""


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    target: ModelDescription
    """As the first target replica described it."""
    draft: ModelDescription | None
    """As a draft replica described it; None before any did."""
    batch_size: int
    draft_count: int | None
    """None: chosen round by round."""
    policy: str
    lane_count: int
    live_sequence_count: int
    waiting_sequence_count: int
    statistics: ClusterStatistics
    targets: tuple[ReplicaDescription, ...] = ()
    drafts: tuple[ReplicaDescription, ...] = ()
