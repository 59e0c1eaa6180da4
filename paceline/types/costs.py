"""What rounds cost and gave, as a coordinator measured it: enough to foresee rounds that were never run."""

from dataclasses import dataclass

from paceline.types.drafting import DraftSource


@dataclass(frozen=True, slots=True)
class CallCosts:
    """Sums over the calls of about one size to services of one model."""

    draft_model: str
    """Empty for calls to the target."""
    round_count_at_once: int
    """Rounds of the coordinator that were in flight when the call's round began, its own included."""
    row_count: int
    """Of each call."""
    step_count: int
    """Most tokens that a row of the call drafts, or brings as drafts to verify."""
    call_count: int = 0
    drafted_count: int = 0
    """Draft tokens that were made or verified."""
    prompt_count: int = 0
    """Tokens that the service had to take in first: of prompts, or of what it had missed."""
    executed_s: float = 0.0
    executed_squares: float = 0.0
    """Squares of each call's seconds of work, for their spread."""
    wire_s: float = 0.0
    own_s: float = 0.0
    """Seconds of the rounds in neither hop; of calls to the target only, of which each round has one."""
    wire_squares: float = 0.0
    """Squares of each call's seconds on the wire, for their spread."""


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """How often drafts of one source were right, by their place."""

    source: DraftSource
    draft_model: str = ""
    """Empty for sources other than draft services."""
    compared_counts: tuple[int, ...] = ()
    """Times that the first, second, ... draft was compared: all before it were right."""
    right_counts: tuple[int, ...] = ()
    output_deviation: float = 0.0
    """Standard deviation of the share of right drafts from one output to another, beyond luck."""

    @property
    def rate(self) -> float:
        """Share of right drafts among those compared."""
        return sum(self.right_counts) / sum(self.compared_counts)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    calls: tuple[CallCosts, ...] = ()
    acceptances: tuple[AcceptanceCounts, ...] = ()

    def calls_of(self, draft_model: str = "") -> list[CallCosts]:
        """Return those of calls to draft services of a model, or else to targets."""
        return [one for one in self.calls if one.draft_model == draft_model]

    def drafts_of(self, draft_model: str) -> AcceptanceCounts | None:
        """Return what became of drafts of a model's draft services; None where none was compared."""
        kind = DraftSource.DRAFT, draft_model
        own = (one for one in self.acceptances if (one.source, one.draft_model) == kind)
        return next((one for one in own if one.compared_counts), None)
