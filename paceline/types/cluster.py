"""A coordinator's description of itself and its rounds."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from paceline.types.costs import MeasuredCosts
from paceline.types.drafting import DraftSource, SourceUsage
from paceline.types.models import ModelDescription
from paceline.types.rounds import HopTime

PolicyName = Literal["continuous", "eqspec", "exspec"]
"""Policies that commands and settings offer; the coordinator's table of policies has one of each."""
PAPER_POLICIES: frozenset[str] = frozenset({"eqspec", "exspec"})
"""Policies of *Batch Speculative Decoding Done Right*. They run in one lane; benches give them the dense layout."""


@dataclass(frozen=True, slots=True)
class ClusterStatistics:
    """Statistics of a coordinator's rounds since it started."""

    round_count: int = 0
    fallback_round_count: int = 0
    """Rounds for which the policy found no group of the kind it looks for."""
    drafted_count: int = 0
    accepted_count: int = 0
    committed_count: int = 0
    accepted_counts_by_position: tuple[int, ...] = ()
    """Number of times that the first, second, ... draft of a row was accepted."""
    round_counts_by_group_size: tuple[tuple[int, int], ...] = ()
    occupancy_while_waiting: float = 1.0
    """Share of filled slots in rounds that began while other generations waited."""
    preemption_count: int = 0
    round_s: float = 0.0
    """Seconds of all rounds; the part in neither hop is the coordinator's own. Rounds of two lanes overlap."""
    propose: HopTime = HopTime()
    verify: HopTime = HopTime()
    sources: tuple[SourceUsage, ...] = ()
    """Tokens by source: those that drafted at all. Of very many draft models some are named `other`."""


class ReplicaState(Enum):
    UNSPECIFIED = "unspecified"
    """A state that this version does not know."""
    UP = "up"
    DRAINING = "draining"
    """It answers, but wants nothing new, or no name leads to it any more. Its generations move away."""
    DOWN = "down"
    REFUSED = "refused"
    """This coordinator cannot work with its model."""


class CircuitState(Enum):
    UNSPECIFIED = "unspecified"
    """A state that this version does not know."""
    CLOSED = "closed"
    """Calls go through."""
    OPEN = "open"
    """No calls: waiting for them would be in vain."""
    HALF_OPEN = "half_open"
    """One call is under way to see whether the service works again."""


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """A replica of a model service, as its coordinator sees it."""

    address: str
    state: ReplicaState
    sequence_count: int
    """Generations of this coordinator that are placed on it."""
    circuit: CircuitState | None = None
    """None from an older coordinator, which tells the circuits of draft replicas only."""
    model_id: str = ""
    """Model it serves; empty while that is not known, and from an older coordinator."""


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    target: ModelDescription
    """Description by the first target replica."""
    draft: ModelDescription | None
    """Description by a draft replica; None before any, and where none is wanted."""
    batch_size: int
    draft_count: int | None
    """Draft tokens a round and generation; None: chosen round by round."""
    policy: str
    lane_count: int
    live_sequence_count: int
    waiting_sequence_count: int
    statistics: ClusterStatistics
    targets: tuple[ReplicaDescription, ...] = ()
    drafts: tuple[ReplicaDescription, ...] = ()
    costs: MeasuredCosts | None = None
    """None if they were not asked for, or from an older coordinator."""
    process_count: int = 1
    """Coordinator processes behind the address. Load, statistics and costs are those of the one that answered."""
    process_index: int = 0
    """Process that answered."""
    sources: tuple[DraftSource, ...] | None = None
    """Sources that drafts can come from, none in plain decoding. None: an older coordinator, which does not tell."""
