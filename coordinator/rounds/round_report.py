"""What a round tells of itself: tokens by row and source, times, and what failed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from coordinator.requests.generation import Generation, HeadsDraft
from paceline.errors import PacelineError
from paceline.types import DraftSource, HopTime, SourceUsage, UsageSums, add_usage

NEW_TO_DRAFT = 2
"""Tokens that a draft service has not cached after full acceptance: its last draft token and the next token."""


@dataclass(slots=True)
class RowReport:
    """What a round brought one generation."""

    drafted_count: int
    accepted_count: int
    committed_count: int
    source: DraftSource | None = None
    """What drafted; None: nothing did."""
    draft_model: str = ""
    """The draft service's model; empty for other sources."""
    generation: Generation | None = None
    token_ids: Sequence[int] = ()
    """Committed tokens."""
    heads_draft: HeadsDraft | None = None
    """What the target's heads drafted after them; None: they were not asked."""
    is_last: bool = False
    """Whether the output ended with them."""

    @property
    def usage(self) -> SourceUsage | None:
        """What drafted, with the same counts; None if nothing did."""
        if not self.source or not self.drafted_count:
            return None
        return SourceUsage(self.source, self.draft_model, self.drafted_count, self.accepted_count)


@dataclass(slots=True)
class DraftCall:
    """What the rows of a round asked of the draft services of one model."""

    row_count: int
    step_count: int
    """Most tokens that a row asked for."""
    token_count: int
    """Tokens that all rows asked for."""
    caught_up_count: int
    """Tokens that the service had missed and took in first."""
    prepared_wait_s: float | None = None
    """Seconds that the round waited for drafts that were prepared; None: it waited for the call's answer."""


@dataclass(frozen=True)
class Shortage:
    """The rows of a round that found no room in the target's cache."""

    missing_bytes: Mapping[Generation, int]
    """Bytes that each of them lacks, by generation; 0 if unknown."""
    retry_after_s: float


@dataclass(frozen=True)
class RoundReport:
    rows: list[RowReport]
    """Reports of the rows that committed tokens."""
    duration_s: float
    """Time of this round and of the further ones, as are those of the hops."""
    propose: HopTime
    verify: HopTime
    draft_error: PacelineError | None
    """The error of the draft call; None if it did not fail as a whole."""
    shortage: Shortage | None
    """The rows that found no room in the target's cache, if any; their generations are unchanged."""
    is_decoding: bool = True
    """Whether no row brought a prompt or anything else that a service had lost or missed."""
    prompt_token_count: int = 0
    """Tokens that the target computed before it could decode."""
    failed: Mapping[Generation, PacelineError] = field(default_factory=dict)
    """Generations whose row failed for good, with the error."""
    draft_calls: Mapping[str, DraftCall] = field(default_factory=dict)
    """Calls for drafts, by model."""
    heads_count: int = 0
    """Tokens that the target's heads were asked for, after the rows that committed."""
    others_s: float = 0.0
    """Time of its calls in which the models worked for other coordinators."""
    target_worked_s: float = 0.0
    """Time that the target had worked for all coordinators when it answered; 0 if it does not tell."""
    further: Sequence[Sequence[RowReport]] = ()
    """Reports of the rows of each further round, which the target ran by itself in the same call."""
    pass_count: int = 1
    """Rounds that the target ran in the call, those after the ends of outputs too: its time is that of all."""
    draft_times: Mapping[str, HopTime] = field(default_factory=dict)
    """Times of the calls for drafts that did not fail, by model. They ran side by side."""
    drafts_lack_room: bool = False
    """Whether a draft service had no room in its cache for a row."""

    @property
    def further_s(self) -> float:
        """Time of the further rounds, each of which takes about as long as the first one."""
        return self.verify.executed_s * (1 - 1 / self.pass_count)

    @cached_property
    def all_rows(self) -> list[RowReport]:
        """Reports of this round's rows and of the further ones'."""
        return [*self.rows, *chain.from_iterable(self.further)] if self.further else self.rows

    @cached_property
    def drafted_count(self) -> int:
        return sum([row.drafted_count for row in self.all_rows])

    @cached_property
    def sources(self) -> tuple[SourceUsage, ...]:
        """Draft tokens of all rows by source."""
        sums: UsageSums = {}
        for row in self.all_rows:
            if row.source:
                add_usage(sums, row.source, row.draft_model, row.drafted_count, row.accepted_count)
        return tuple(sums.values())
