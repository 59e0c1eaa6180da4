"""The two ways to ask: chats and completions. Each has its body, its choices and the names of its objects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.gateway.bodies import ChatBody, CompletionBody, GenerationBody
from paceline.gateway.choices import ChatChoice, Choice, CompletionChoice
from paceline.gateway.requests import chat_requests, completion_requests
from paceline.gateway.tool_calls import ToolFormat
from paceline.types import GenerationRequest

BodyT = TypeVar("BodyT", bound=GenerationBody)


@dataclass(frozen=True)
class Api(Generic[BodyT]):
    path: str
    body: type[BodyT]
    requests: Callable[[BodyT, ToolFormat], list[GenerationRequest]]
    """Requests for coordinators, one for each prompt."""
    choice: Callable[[int, BodyT, ToolFormat], Choice]
    prompt_param: str
    """The field that holds what coordinators call the prompt."""
    id_prefix: str
    whole_object: str
    chunk_object: str


def _completion_choice(index: int, body: CompletionBody, _: ToolFormat) -> Choice:
    return CompletionChoice(index, body)


CHAT = Api(
    "/v1/chat/completions",
    ChatBody,
    chat_requests,
    ChatChoice,
    "messages",
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
)
COMPLETION = Api(
    "/v1/completions",
    CompletionBody,
    completion_requests,
    _completion_choice,
    "prompt",
    "cmpl-",
    "text_completion",
    "text_completion",
)
APIS: tuple[Api[Any], ...] = (CHAT, COMPLETION)
