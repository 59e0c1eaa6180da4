"""Requests of clients and the answers to them."""

from dataclasses import dataclass
from enum import Enum

from paceline.types.drafting import DraftingOptions, DraftSource, SourceUsage
from paceline.types.sampling import SamplingParameters, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt that the target's tokenizer encodes with its defaults."""

    value: str


@dataclass(frozen=True, slots=True)
class UserMessage:
    """A prompt that is put into the target's chat template."""

    value: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt taken as it is."""

    values: tuple[int, ...]


Prompt = Text | UserMessage | TokenIds
Prediction = Text | TokenIds


@dataclass(frozen=True, slots=True)
class ReceivedOutput:
    """The part of one output that a client has already."""

    completion_index: int
    token_ids: tuple[int, ...] = ()
    ended: bool = False
    """Whether its finish was received too; then it is not made again."""


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
    """Number of outputs for the prompt, each with its own noise."""
    top_logprob_count: int | None = None
    """Likeliest tokens to report log-probabilities of at each place, beside the chosen one; None reports none."""
    received_outputs: tuple[ReceivedOutput, ...] = ()
    """Outputs that the client has already, made with this seed; each continues as if it had not been interrupted."""
    model_digest: str = ""
    """`ModelIdentity.model_digest` of the model that has to answer, which made `received_outputs`. Empty: any model."""
    drafting: DraftingOptions = DraftingOptions()
    predicted_output: Prediction | None = None
    """The output that the client expects, from its beginning: where it is right, tokens come faster."""


class FinishReason(Enum):
    UNSPECIFIED = "unspecified"
    """A reason that this version does not know; the output is complete all the same."""
    END_TOKEN = "end_token"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"


@dataclass(frozen=True, slots=True)
class OutputToken:
    token_id: int
    text: str
    """Text that this token completed: whole characters only."""
    accepted: bool
    """Whether it was drafted."""
    logprobs: TokenLogprobs | None = None
    source: DraftSource | None = None
    """What drafted it; None: the target's own next token."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_count: int
    output_count: int = 0
    drafted_count: int = 0
    accepted_count: int = 0
    round_count: int = 0
    accepted_counts_by_position: tuple[int, ...] = ()
    """Number of times that the first, second, ... draft of a round was accepted."""
    queued_s: float = 0.0
    """Seconds from submission until its first round began."""
    sources: tuple[SourceUsage, ...] = ()
    """Drafted and accepted tokens by source: those that drafted at all."""


@dataclass(frozen=True, slots=True)
class GenerationFinish:
    reason: FinishReason
    usage: Usage
    seed: int = 0
    """Seed that makes the output again."""


@dataclass(frozen=True, slots=True)
class GenerationAccepted:
    """The news that a request is queued, with what is needed to continue it elsewhere if its stream breaks."""

    request_id: str
    seed: int
    """Seed of the request, given or drawn."""
    prompt_count: int
    model_digest: str = ""
    """Digest of the model that answers; empty if its service tells none."""


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Tokens committed since the last piece; the last one of an output carries the finish."""

    tokens: tuple[OutputToken, ...]
    finish: GenerationFinish | None = None
    completion_index: int = 0
