"""What a client asks for and gets."""

from dataclasses import dataclass
from enum import Enum

from paceline.types.sampling import SamplingParameters, TokenLogprobs


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
class ReceivedOutput:
    """How much of one output of a request a client has."""

    completion_index: int
    token_ids: tuple[int, ...] = ()
    ended: bool = False
    """Its finish was received too: it is not made again."""


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
    received_outputs: tuple[ReceivedOutput, ...] = ()
    """What the client has already, with this seed: each output goes on after it, as if it had not been interrupted."""
    model_digest: str = ""
    """Model that has to answer, as `ModelIdentity` has it: of which `received_outputs` are. Empty: whichever."""


class FinishReason(Enum):
    UNSPECIFIED = "unspecified"
    """One that this version does not know: the output is whole all the same."""
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
    queued_s: float = 0.0
    """Seconds from submission until its first round began."""


@dataclass(frozen=True, slots=True)
class GenerationFinish:
    reason: FinishReason
    usage: Usage
    seed: int = 0
    """What the output can be had again with."""


@dataclass(frozen=True, slots=True)
class GenerationAccepted:
    """A request is queued: what is needed to continue it elsewhere, should its stream break."""

    request_id: str
    seed: int
    """Of the request, given or drawn."""
    prompt_count: int
    model_digest: str = ""
    """Of the model that answers; empty where its service does not tell."""


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Tokens committed since the last piece; the last one of an output carries the finish."""

    tokens: tuple[OutputToken, ...]
    finish: GenerationFinish | None = None
    completion_index: int = 0
