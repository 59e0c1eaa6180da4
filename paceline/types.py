"""The values that cross module borders. Frozen, free of protobuf, gRPC and torch.

Lengths and positions count tokens from the start of the prompt.
"""

from dataclasses import dataclass
from enum import Enum

from paceline.errors import PacelineError


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How tokens are chosen; the defaults are greedy."""

    temperature: float = 0.0
    """0 takes the likeliest token; 1 samples the model's own distribution."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the likeliest."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and what is added to their logits."""
    repetition_penalty: float = 1.0
    """Over 1 makes tokens of prompt and output less likely."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens of the output."""
    frequency_penalty: float = 0.0
    """Taken from them once for each time they occur there."""
    min_new_tokens: int = 0
    """No end token before so many tokens of output."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """All that a choice depends on beside the logits and the tokens before it."""

    sampling: SamplingParameters = SamplingParameters()
    seed: int = 0
    """64 bits."""
    prompt_count: int = 0
    """Leading tokens of the sequence that are no output: penalties and `min_new_tokens` count from there."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that `min_new_tokens` rules out."""


GREEDY = ChoiceRule()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the target itself, before any sampling parameter."""

    logprob: float
    """Of the token that was chosen."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and theirs."""


@dataclass(frozen=True, slots=True)
class ProposeRow:
    """One sequence of a propose call: keep `base_length` cached tokens, append `token_ids`, propose `draft_count`."""

    sequence_id: str
    base_length: int
    token_ids: tuple[int, ...]
    draft_count: int
    rule: ChoiceRule = GREEDY


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
    rule: ChoiceRule = GREEDY
    top_logprob_count: int | None = None
    """Log-probabilities wanted: of the chosen tokens and of so many others; None: of none."""


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
    """A verify row that was taken in part, for others should not wait for a long prompt: send the rest next."""

    cached_length: int


VerifyOutcome = Verdict | Prefilled


@dataclass(frozen=True, slots=True)
class CallTiming:
    """What a model service did with a call's time; the rest was the wire's."""

    queued_s: float = 0.0
    executed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Proposals:
    """Answer to a propose call: one result a row, in its order."""

    results: list[Proposal | PacelineError]
    timing: CallTiming = CallTiming()


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Answer to a verify call: one result a row, in its order."""

    results: list[VerifyOutcome | PacelineError]
    timing: CallTiming = CallTiming()


@dataclass(frozen=True, slots=True)
class SequenceLength:
    sequence_id: str
    length: int


@dataclass(frozen=True, slots=True)
class CacheDescription:
    layout: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    """Held by sequences."""
    idle_bytes: int = 0
    """Kept for prompts that begin alike; given up when memory is wanted."""
    sequence_count: int = 0
    token_bytes: int = 0
    max_length: int = 0
    """Tokens one sequence may have when it has the cache to itself."""
    page_tokens: int = 0
    prefill_chunk_tokens: int = 0
    """Most prompt tokens one call computes for all its rows."""
    shared_token_count: int = 0
    """Tokens that were taken over from earlier prompts instead of being computed, since the start."""
    realigned_bytes: int = 0
    """Copied by the dense layout to keep its rectangle, since the start; 0 in the paged one."""
    realignment_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelDescription:
    model_id: str
    architecture: str
    vocabulary_size: int
    tokenizer_fingerprint: str
    """Empty when the model has no tokenizer."""
    max_length: int
    end_token_ids: tuple[int, ...]
    device: str
    dtype: str
    parameter_count: int
    has_chat_template: bool = False
    numerics: str = "fast"
    cache: CacheDescription = CacheDescription()


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as text, so that it can travel."""

    tokenizer_json: str
    """In the `tokenizers` library's form."""
    chat_template: str = ""
    """Jinja; empty when the model has none."""
    special_tokens_json: str = "{}"
    """JSON object of the special tokens a chat template may name."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt to be tokenized as the target's tokenizer does by default."""

    value: str


@dataclass(frozen=True, slots=True)
class UserMessage:
    """A prompt to be put into the target's chat template."""

    value: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt taken as it is."""

    values: tuple[int, ...]


Prompt = Text | UserMessage | TokenIds


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    prompt: Prompt
    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_end_tokens: bool = False
    max_draft_count: int | None = None
    """0 decodes plainly; None leaves it to the coordinator."""
    sampling: SamplingParameters = SamplingParameters()
    seed: int | None = None
    """64 bits; None: the coordinator draws one and reports it."""
    completion_count: int = 1
    """Outputs for the prompt, each with noise of its own."""
    top_logprob_count: int | None = None
    """Report log-probabilities: of the tokens, and of so many others at each place."""
    received_token_ids: tuple[int, ...] = ()
    """Output that the client has already: generation goes on after it, as if it had not been interrupted."""


class FinishReason(Enum):
    END_TOKEN = "end_token"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"


@dataclass(frozen=True, slots=True)
class OutputToken:
    token_id: int
    text: str
    """What became complete with this token: whole characters only."""
    accepted: bool
    """True when the draft had proposed it."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_count: int
    output_count: int = 0
    drafted_count: int = 0
    accepted_count: int = 0
    round_count: int = 0
    accepted_counts_by_position: tuple[int, ...] = ()
    """How often the first, second, ... draft of a round was accepted."""


@dataclass(frozen=True, slots=True)
class GenerationFinish:
    reason: FinishReason
    usage: Usage
    seed: int = 0
    """What the output can be had again with."""


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Tokens committed by one round; the last piece of an output carries the finish."""

    tokens: tuple[OutputToken, ...]
    finish: GenerationFinish | None = None
    completion_index: int = 0


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
