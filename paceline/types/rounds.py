"""Calls from the coordinator to the model services and their answers, row by row.

What is made for every row of every round is a value, though not frozen: that would take four times as long.
"""

from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.types.models import ModelIdentity
from paceline.types.sampling import GREEDY, ChoiceRule, TokenLogprobs


@dataclass(slots=True)
class ProposeRow:
    """One sequence of a propose call: keep `base_length` cached tokens, append `token_ids`, propose `draft_count`."""

    sequence_id: str
    base_length: int
    token_ids: tuple[int, ...]
    draft_count: int
    rule: ChoiceRule | None = GREEDY
    """None: the rule that was told for the sequence before."""
    following_count: int = 0
    """Committed tokens that come with later rows. Over 0, this row is a part and is answered without drafts."""
    base_hash: int | None = None
    """`PrefixHash` of the first `base_length` tokens; None: not compared."""
    prepare_count: int = 0
    """Draft tokens to prepare after likely outcomes of this row's drafts, and to send unasked."""


@dataclass(slots=True)
class Proposal:
    draft_token_ids: tuple[int, ...]
    cached_length: int
    """Cached prefix, with the row's tokens and all draft tokens but the last."""
    prepared: bool = False
    """Whether the drafts, or the first of them, were made before the row came."""


@dataclass(frozen=True, slots=True)
class PreparedDrafts:
    """What a draft service proposes first after a prefix, told before the prefix is known to be right."""

    sequence_id: str
    length: int
    """Tokens of the prefix."""
    hash: int
    """`PrefixHash` of the prefix."""
    draft_token_ids: tuple[int, ...]


@dataclass(slots=True)
class VerifyRow:
    """One sequence of a verify call: keep `base_length` cached tokens, append `token_ids`, verify the draft tokens."""

    sequence_id: str
    base_length: int
    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...]
    rule: ChoiceRule | None = GREEDY
    """None: the rule that was told for the sequence before."""
    top_logprob_count: int | None = None
    """Likeliest tokens to report log-probabilities of, beside the chosen ones; None reports none."""
    following_count: int = 0
    """Committed tokens that come with later rows. Over 0, this row is a part and is answered by `Prefilled`."""
    base_hash: int | None = None
    """`PrefixHash` of the first `base_length` tokens; None: not compared."""
    draft_is_idle: bool = False
    """Whether no draft service works while `draft_token_ids` are verified."""
    scores_tokens: bool = False
    """Whether log-probabilities of `token_ids` after the first are asked for too. If the row is a part, its last token
    is not appended then: the next row begins with it."""
    propose_count: int = 0
    """Most tokens that the target's own heads are to draft after the next token."""
    further_count: int = 0
    """Most further rounds that the target may run by itself, each with what its heads drafted before it, if any."""

    def scored_count(self, outcome: "VerifyOutcome") -> int:
        """Return the tokens that a service that scores tokens has scored with this outcome."""
        if not self.scores_tokens:
            return 0
        return len(self.token_ids) - 1 if isinstance(outcome, Verdict) else outcome.cached_length - self.base_length


@dataclass(slots=True)
class Verdict:
    accepted_count: int
    next_token_id: int
    """The target's choice after the accepted tokens; not in the cache."""
    cached_length: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the accepted tokens and the next token, if asked for."""
    token_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the row's committed tokens after its first, if asked for."""
    reused_count: int = 0
    """Tokens of the row that were taken over from earlier prompts instead of being computed."""
    draft_token_ids: tuple[int, ...] = ()
    """Tokens that the target's own heads draft after the next token."""
    further: "tuple[Verdict, ...]" = ()
    """Verdicts of further rounds: each on a row of the next token and the drafts of the one before."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Answer to a verify row that is a part or was taken in part, so that others do not wait for a long prompt."""

    cached_length: int
    token_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the token that follows each appended one, if asked for."""
    reused_count: int = 0
    """As of a `Verdict`."""


VerifyOutcome = Verdict | Prefilled


@dataclass(frozen=True, slots=True)
class CallTiming:
    """Seconds of a call that a model service accounts for; the rest was spent on the wire."""

    queued_s: float = 0.0
    """Time the call waited for others, the work on calls that were served together with it included."""
    executed_s: float = 0.0
    """Time of work on this call: of work on several, its part."""
    others_s: float = 0.0
    """Part of `queued_s` in which the model worked for other callers."""
    worked_s: float = 0.0
    """Time of work on calls of all callers since the service started; 0 from a service that does not tell."""


@dataclass(frozen=True, slots=True)
class HopTime:
    """Seconds of calls to a model service by their use, as the caller sees it."""

    wire_s: float = 0.0
    """Time that is neither queued nor executed: serialising, the network, event loops."""
    queued_s: float = 0.0
    executed_s: float = 0.0

    @staticmethod
    def of(elapsed_s: float, timing: CallTiming) -> "HopTime":
        """Return the time of a call that took so long, of which the service accounts for a part."""
        return HopTime(max(0.0, elapsed_s - timing.queued_s - timing.executed_s), timing.queued_s, timing.executed_s)

    @property
    def total_s(self) -> float:
        return self.wire_s + self.queued_s + self.executed_s


@dataclass(frozen=True, slots=True)
class Proposals:
    """Answer to a propose call: one result a row, in its order."""

    results: list[Proposal | PacelineError]
    timing: CallTiming = CallTiming()
    identity: ModelIdentity = ModelIdentity()
    """Identity of the process that answered."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Answer to a verify call: one result a row, in its order."""

    results: list[VerifyOutcome | PacelineError]
    timing: CallTiming = CallTiming()
    identity: ModelIdentity = ModelIdentity()
    """Identity of the process that answered."""


@dataclass(frozen=True, slots=True)
class SequenceLength:
    sequence_id: str
    length: int


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The result of cutting a sequence to a length."""

    cached_length: int
    freed_bytes: int
    """Bytes that other sequences can use now. Shared pages are not freed."""
