"""The values that cross module borders. Frozen, free of protobuf, gRPC and torch.

Lengths and positions count tokens from the start of the prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class ProposeRow:
    """One sequence of a propose call: keep `base_length` cached tokens, append `token_ids`, propose `draft_count`."""

    sequence_id: str
    base_length: int
    token_ids: tuple[int, ...]
    draft_count: int


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


@dataclass(frozen=True, slots=True)
class Verdict:
    accepted_count: int
    next_token_id: int
    """The target's choice after the accepted tokens; not in the cache."""
    cached_length: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A verify row that was taken in part, for others should not wait for a long prompt: send the rest next."""

    cached_length: int


VerifyOutcome = Verdict | Prefilled


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


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_count: int
    output_count: int = 0
    drafted_count: int = 0
    accepted_count: int = 0
    round_count: int = 0


@dataclass(frozen=True, slots=True)
class GenerationFinish:
    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Tokens committed by one round; the last piece of an output carries the finish."""

    tokens: tuple[OutputToken, ...]
    finish: GenerationFinish | None = None


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    target: ModelDescription
    draft: ModelDescription
    batch_size: int
    draft_count: int
    live_sequence_count: int
    waiting_sequence_count: int
    round_count: int
    drafted_count: int
    accepted_count: int
    preemption_count: int


Metadata = Mapping[str, str]
