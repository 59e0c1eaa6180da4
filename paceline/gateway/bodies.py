"""Bodies of requests: types and ranges of OpenAI's API, vLLM's extras, and ours under `paceline`.

Types are strict. Fields that nobody knows are ignored, as vLLM does; `refused_fields` has those that are refused. Says
nothing of what the fields mean.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator

from paceline.chat_template import MAX_STRINGS
from paceline.checks import MAX_LOGIT_BIASES, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from paceline.gateway.refused_fields import RefusedChatFields, RefusedCompletionFields, RefusedFields, Unsupported
from paceline.types import SOURCE_NAMES

LARGEST = (1 << 31) - 1
"""Largest number of a field of 32 bits."""
MAX_PROMPTS = 256
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
TOKEN_KEY = re.compile(r"[0-9]{1,10}")

Json = dict[str, Any]
EntryT = TypeVar("EntryT")
# A list is given up at its first wrong entry: an error for each took hundreds of times the list's own bytes.
Entries = Annotated[list[EntryT], Field(max_length=MAX_STRINGS, fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


@dataclass(frozen=True)
class NamedTool:
    """The choice of one tool."""

    name: str


class WrongField(ValueError):
    """A field that is not known, or does not go with others of its body."""

    def __init__(self, name: str, words: str) -> None:
        super().__init__(words)
        self.name = name


def is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= LARGEST for one in value)


def _text(value: object) -> str | None:
    """Read a content: text, or a list of parts that are text."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("is neither text nor a list of parts; give one of them")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('has a part that is no text; give parts such as {"type": "text", "text": "..."}')
    return "".join(part["text"] for part in value)


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        if len(value) > MAX_STOP_STRINGS or sum(map(len, value)) > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"is more than {MAX_STOP_STRINGS} strings or {MAX_STOP_CHARACTERS} characters together; give fewer"
            )
        return tuple(value)
    raise ValueError("is neither a string nor a list of strings; give one of them")


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Read a prompt or several: text or token ids, or a list of texts or of lists of token ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if len(value) <= MAX_PROMPTS and all(isinstance(one, str) for one in value):
            return tuple(value)
        if is_token_ids(value):
            return (tuple(value),)
        if len(value) <= MAX_PROMPTS and all(is_token_ids(one) for one in value):
            return tuple(tuple(one) for one in value)
    raise ValueError(
        "has another form; give a string, a list of strings, a list of token ids, or a list of lists of them; "
        f"{MAX_PROMPTS} at most"
    )


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError('is no object; give one of token ids and numbers, such as {"42": -100}')
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"has {len(value)} entries; give {MAX_LOGIT_BIASES} at most")
    for key, bias in value.items():
        if not TOKEN_KEY.fullmatch(key) or int(key) > LARGEST:
            raise ValueError("has a key that is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError("has a value outside -100 to 100")
    return tuple((int(key), float(bias)) for key, bias in value.items())


def _tool_choice(value: object) -> Literal["auto", "none", "required"] | NamedTool | None:
    if value is None or value in ("auto", "none", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
        name = value["function"].get("name")
        if isinstance(name, str):
            return NamedTool(name)
    raise ValueError(
        'is no choice; give "auto", "none", "required", or {"type": "function", "function": {"name": "..."}}'
    )


def _tool(value: object) -> Json:
    """Check a tool, and leave it as it is: the template reads it."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise ValueError('is no function; give {"type": "function", "function": {"name": "...", "parameters": {...}}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise ValueError("has no function name of 1 to 64 letters, digits, _, . and -")
    if parameters is not None and not isinstance(parameters, dict):
        raise ValueError("has parameters that are no JSON Schema object")
    return value


def _source(word: str) -> str:
    if word not in SOURCE_NAMES:
        raise ValueError(f"is no source of drafts; give any of {', '.join(SOURCE_NAMES)}")
    return word


Content = Annotated[str | None, PlainValidator(_text)]
Tool = Annotated[Json, PlainValidator(_tool)]
Source = Annotated[str, AfterValidator(_source)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def field_names(cls) -> list[str]:
        """Return the names of fields as clients write them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


class ClosedBody(Body):
    """One that refuses fields that are not known."""

    # pydantic's own refusal is an error for each of them, and names no field that is known.
    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _all_fields_are_known(self) -> Self:
        if self.model_extra:
            raise WrongField(next(iter(self.model_extra)), f"is not known; give any of {', '.join(self.field_names())}")
        return self


class PacelineOptions(ClosedBody):
    """Ours: where drafts come from, and what answers tell of rounds."""

    max_draft_count: Count | None = None
    sources: Entries[Source] | None = None
    forbidden_sources: Entries[Source] | None = None
    in_order: bool | None = None
    draft_model: str | None = None
    tell: bool | None = None


class FunctionCall(Body):
    name: str
    arguments: str


class MessageToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: Entries[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Unsupported = None


class JsonSchema(Body):
    name: str | None = None
    schema_: Json | None = Field(default=None, alias="schema")


class ResponseFormatBody(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(ClosedBody):
    """vLLM's. A constraint that is not known is refused: without it the output would be another."""

    json_: Json | str | None = Field(default=None, alias="json")
    regex: str | None = None
    grammar: str | None = None


class PredictionBody(Body):
    type: Literal["content"]
    content: Content


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's."""


class GenerationBody(Body, RefusedFields):
    """What both kinds of requests have."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_biases)] = ()
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Positive | None = None
    response_format: ResponseFormatBody | None = None
    prediction: PredictionBody | None = None
    # vLLM's.
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    min_tokens: Count | None = None
    return_token_ids: bool | None = None
    guided_regex: str | None = None
    structured_outputs: StructuredOutputs | None = None
    # Ours.
    paceline: PacelineOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "GenerationBody":
        if self.stream_options and not self.stream:
            raise WrongField("stream_options", "is for streams; set stream too, or leave it out")
        return self

    @property
    def output_count(self) -> int:
        return self.n or 1

    @property
    def token_limit(self) -> int | None:
        """Most tokens of an output; None where the body sets none."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_usage_always(self) -> bool:
        """Whether each chunk tells the usage up to it."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def is_prompt_alone(self) -> bool:
        """Whether only the prompt is asked for."""
        return False

    @property
    def tells(self) -> bool:
        return bool(self.paceline and self.paceline.tell)


class ChatBody(GenerationBody, RefusedChatFields):
    messages: Annotated[Entries[Message], Field(min_length=1)]
    max_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Entries[Tool] | None = None
    tool_choice: Annotated[Any, PlainValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="after")
    def _parts_come_together(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise WrongField("top_logprobs", "needs logprobs; set it to true")
        names = self.tool_names
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise WrongField("tool_choice", "asks for a call, and there are no tools; give some")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.name not in names:
            raise WrongField("tool_choice", "names a tool that is not among tools")
        return self

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(one["function"]["name"] for one in self.tools or ())

    @property
    def calls_tools(self) -> bool:
        """Whether outputs may have calls of tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forces_call(self) -> bool:
        """Whether outputs must be calls of tools."""
        return bool(self.tools) and self.tool_choice not in (None, "auto", "none")


class CompletionBody(GenerationBody, RefusedCompletionFields):
    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Any = None

    @model_validator(mode="after")
    def _some_output_is_asked_for(self) -> "CompletionBody":
        if self.is_prompt_alone and not self.echo:
            raise WrongField("max_tokens", "is 0 and echo is not set; ask for a token, or for the prompt")
        return self

    @model_validator(mode="after")
    def _no_output_is_left_out(self) -> "CompletionBody":
        if self.best_of is not None and (type(self.best_of) is not int or self.best_of not in (1, self.output_count)):
            raise WrongField("best_of", "is not supported, unless it is n; leave it out")
        return self

    @property
    def is_prompt_alone(self) -> bool:
        """Whether only the prompt is asked for."""
        return self.token_limit == 0
