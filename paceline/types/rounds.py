"""What the coordinator and the model services tell each other, row by row."""

from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.types.models import ModelIdentity
from paceline.types.sampling import GREEDY, ChoiceRule, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ProposeRow:
    """One sequence of a propose call: keep `base_length` cached tokens, append `token_ids`, propose `draft_count`."""

    sequence_id: str
    base_length: int
    token_ids: tuple[int, ...]
    draft_count: int
    rule: ChoiceRule | None = GREEDY
    """None: the one that was told for the sequence before."""
    following_count: int = 0
    """Committed tokens that come with later rows; over 0: this one is a part, and is answered without drafts."""
    base_hash: int | None = None
    """Of the first `base_length` tokens, as `PrefixHash` has it; None: not compared."""


@dataclass(frozen=True, slots=True)
class Proposal:
    draft_token_ids: tuple[int, ...]
    cached_length: int
    """The row's tokens and all draft tokens but the last."""


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One sequence of a verify call: keep `base_length` cached tokens, append `token_ids`, verify the draft tokens."""

    sequence_id: str
    base_length: int
    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...]
    rule: ChoiceRule | None = GREEDY
    """None: the one that was told for the sequence before."""
    top_logprob_count: int | None = None
    """Log-probabilities wanted: of the chosen tokens and of so many others; None: of none."""
    following_count: int = 0
    """Committed tokens that come with later rows; over 0: this one is a part, and is answered by `Prefilled`."""
    base_hash: int | None = None
    """Of the first `base_length` tokens, as `PrefixHash` has it; None: not compared."""

    @property
    def token_count(self) -> int:
        """Tokens that it brings, drafted ones too."""
        return len(self.token_ids) + len(self.draft_token_ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    accepted_count: int
    next_token_id: int
    """The target's choice after the accepted tokens; not in the cache."""
    cached_length: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the accepted tokens and the next one, if asked for."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A verify row that is a part or was taken in part, for others should not wait for a long prompt: send the rest."""

    cached_length: int


VerifyOutcome = Verdict | Prefilled


@dataclass(frozen=True, slots=True)
class CallTiming:
    """What a model service did with a call's time; the rest was the wire's."""

    queued_s: float = 0.0
    executed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HopTime:
    """Where the seconds of calls to a model service went, as their caller sees it."""

    wire_s: float = 0.0
    """All that is neither of the other two: serialising, the network, event loops."""
    queued_s: float = 0.0
    executed_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.wire_s + self.queued_s + self.executed_s


@dataclass(frozen=True, slots=True)
class Proposals:
    """Answer to a propose call: one result a row, in its order."""

    results: list[Proposal | PacelineError]
    timing: CallTiming = CallTiming()
    identity: ModelIdentity = ModelIdentity()
    """Of the process that answered."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Answer to a verify call: one result a row, in its order."""

    results: list[VerifyOutcome | PacelineError]
    timing: CallTiming = CallTiming()
    identity: ModelIdentity = ModelIdentity()
    """Of the process that answered."""


@dataclass(frozen=True, slots=True)
class SequenceLength:
    sequence_id: str
    length: int


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A sequence was cut to a length."""

    cached_length: int
    freed_bytes: int
    """What others can have now. Pages that other sequences share are not freed."""
