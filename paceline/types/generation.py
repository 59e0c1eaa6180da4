"""Requests of clients and the answers to them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import repeat
from typing import overload

from paceline.types.drafting import DraftingOptions, DraftSource, SourceUsage
from paceline.types.rounds import HopTime
from paceline.types.sampling import ResponseFormat, SamplingParameters, TokenLogprobs


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


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Call that a tool's message answers."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that is put into the target's chat template."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[str, ...] = ()
    """JSON objects, as the template reads them."""
    template_arguments: str = ""
    """Further variables of the template: a JSON object."""


Prompt = Text | UserMessage | TokenIds | Chat
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
    response_format: ResponseFormat | None = None
    echo_prompt: bool = False
    """Whether the prompt's tokens are sent too, before the output."""
    tell_rounds: bool = False
    """Whether each piece tells of its round."""
    omit_text: bool = False
    """Whether tokens come without their texts. Stop strings end the output all the same."""
    prompt_time_s: int | None = None
    """Time that the chat template may write into the prompt, in seconds since 1970; None: now."""


class FinishReason(Enum):
    UNSPECIFIED = "unspecified"
    """A reason that this version does not know; the output is complete all the same."""
    END_TOKEN = "end_token"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"


@dataclass(slots=True)
class OutputToken:
    token_id: int
    text: str
    """Text that this token completed: whole characters only."""
    accepted: bool
    """Whether it was drafted."""
    logprobs: TokenLogprobs | None = None
    source: DraftSource | None = None
    """What drafted it; None: the target's own next token."""
    token_bytes: bytes = b""
    """Bytes of the token, if log-probabilities were asked for."""
    top_token_bytes: tuple[bytes, ...] = ()
    """Bytes of each token of `logprobs.top`."""


@dataclass(slots=True)
class TokenRun(Sequence[OutputToken]):
    """Tokens that one round committed of an output, without log-probabilities. Each is made when it is looked at."""

    token_ids: Sequence[int]
    texts: Sequence[str]
    """Texts of the tokens; none where text is left out."""
    accepted_count: int
    """Leading tokens that were drafted."""
    source: DraftSource | None
    """What drafted them."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[OutputToken]:
        texts = self.texts or repeat("")
        for place, (token_id, text) in enumerate(zip(self.token_ids, texts, strict=False)):
            accepted = place < self.accepted_count
            yield OutputToken(token_id, text, accepted, None, self.source if accepted else None)

    @overload
    def __getitem__(self, place: int, /) -> OutputToken: ...
    @overload
    def __getitem__(self, place: slice, /) -> Sequence[OutputToken]: ...
    def __getitem__(self, place: int | slice, /) -> OutputToken | Sequence[OutputToken]:
        return list(self)[place]


@dataclass(slots=True)
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
    cached_prompt_count: int = 0
    """Tokens of the prompt that the target had cached from an earlier prompt."""

    def copy(self) -> "Usage":
        """Return a usage that does not grow with this one."""
        return replace(self, sources=tuple(map(replace, self.sources)))


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
    model_id: str = ""
    """Name of that model."""
    prompt_time_s: int = 0
    """Time that the chat template had, given or of the request's arrival; 0 if its coordinator tells none."""
    max_new_tokens: int = 0
    """Most tokens of each output, given or the coordinator's own limit; 0 if it tells none."""


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """What the round that committed some tokens took."""

    group_size: int
    drafted_count: int
    """Draft tokens verified for this output."""
    accepted_count: int
    source: DraftSource | None
    """What drafted; None: nothing did."""
    propose: HopTime | None
    """The call to a draft service; None: there was none."""
    verify: HopTime
    round_s: float
    """Seconds until the tokens were committed; what is in neither hop is the coordinator's own."""
    waited_s: float
    """Seconds from its last round, or from its arrival, until the round began."""


@dataclass(slots=True)
class OutputPiece:
    """Tokens committed since the last piece; the last one of an output carries the finish."""

    tokens: Sequence[OutputToken]
    finish: GenerationFinish | None = None
    completion_index: int = 0
    prompt_tokens: tuple[OutputToken, ...] = ()
    """The prompt, once, if it was asked for."""
    round: RoundSummary | None = None
    """The round that committed the tokens, if it was asked for."""
