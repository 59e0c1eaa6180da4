"""Errors as OpenAI's clients know them: a status, and `{"error": {"message", "type", "param", "code"}}`.

Errors of coordinators name the fields of our own requests; here they get the names that the body has.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import (
    CallTimedOut,
    InvalidRequest,
    MessageTooLarge,
    MethodNotFound,
    ModelChanged,
    Overloaded,
    PacelineError,
    PeerUnavailable,
    PermissionDenied,
    PromptTooLong,
    TokenizerNotFound,
    Unauthenticated,
)
from paceline.request_ids import REQUEST_ID

log = structlog.get_logger()
INVALID, SERVER = "invalid_request_error", "server_error"
RETRY_SOON = {"retry-after": "1"}
NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients ask again by themselves after any status of 500s, unless this says that it would be of no use."""
PARAMS = {
    "prompt.token_ids": "prompt",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
    "top_logprob_count": "top_logprobs",
    "completion_count": "n",
    "echo_prompt": "echo",
    "ignore_end_tokens": "ignore_eos",
    "predicted_output": "prediction",
    "sampling.min_new_tokens": "min_tokens",
    "drafting": "paceline",
    "max_draft_count": "paceline.max_draft_count",
    "chat.template_arguments": "chat_template_kwargs",
}
"""Names that bodies have for fields of a request, where they differ."""
_NAMES = {ours: theirs for ours, theirs in PARAMS.items() if "_" in ours}
_NAMES |= {ours.rpartition(".")[2]: theirs for ours, theirs in _NAMES.items() if not ours.startswith("prompt.")}
_NAMES["drafting."] = f"{PARAMS['drafting']}."
_OURS = re.compile(rf"\b(?:{'|'.join(map(re.escape, _NAMES))})\b|\bsampling\.(?=\w)|\bchat\.(?=(?:messages|tools)\b)")
"""The names that differ, and the part of others that bodies do without, as they stand in messages."""
_CALL = re.compile(r"(\btool_calls\[\d+\]\.)(?=arguments\b)")
"""What stands before the arguments of a call; bodies have them in its `function`."""


@dataclass(eq=False)
class HttpError(Exception):
    """An answer that is an error."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> "HttpError":
        """Return the error with other names of fields."""
        message = self.message
        for known, other in names.items():
            message = re.sub(rf"\b{known}\b", other, message)
        return replace(self, message=message, param=names.get(self.param or "", self.param))

    @property
    def body(self) -> bytes:
        form = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": form}).encode()

    @property
    def response(self) -> Response:
        return Response(self.body, self.status, dict(self.headers), "application/json")


def invalid(message: str, param: str | None = None) -> HttpError:
    return HttpError(400, message, param=param)


UNEXPECTED = HttpError(500, "the gateway failed unexpectedly; its log says why", SERVER)


def shutting_down() -> HttpError:
    # Made anew each time, as all errors: one that is raised keeps the frames that it passes.
    words = "the gateway is shutting down; ask again, which reaches another"
    return HttpError(503, words, SERVER, headers=RETRY_SOON)


def unserved() -> HttpError:
    # No more than that: whoever asks for health shows no token, and gRPC's words name addresses.
    return HttpError(503, "no coordinator serves this gateway; its log says why", SERVER, headers=RETRY_SOON)


def too_many(words: str, retry_after_s: float = 1.0) -> HttpError:
    headers = {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    return HttpError(429, words, "rate_limit_error", code="rate_limit_exceeded", headers=headers)


def http_error(error: PacelineError) -> HttpError:
    """Return the answer for an error of the gateway's own checks or of a coordinator."""
    message = error.message
    match error:
        case PromptTooLong():
            return HttpError(400, _renamed(message), param=_param(error.field), code="context_length_exceeded")
        case InvalidRequest():
            return invalid(_renamed(message), _param(error.field))
        case TokenizerNotFound():
            return invalid(message)
        case MessageTooLarge():
            return HttpError(413, _renamed(message), code="request_too_large")
        case Overloaded():
            return too_many(message, error.retry_after_s)
        case CallTimedOut():
            # The same request would take as long again, and be asked a third time then.
            return HttpError(504, message, SERVER, code="timeout", headers=NO_RETRY)
        case ModelChanged():
            return HttpError(503, message, SERVER, code="model_changed", headers=RETRY_SOON)
        case PeerUnavailable():
            return HttpError(503, message, SERVER, code="unavailable", headers=RETRY_SOON)
        case Unauthenticated() | PermissionDenied() | MethodNotFound():
            return HttpError(502, f"the coordinator refused the gateway's call: {message}", SERVER, code="bad_gateway")
    return HttpError(500, message, SERVER)


def _param(field: str) -> str | None:
    """Return the body's name for a field of a request; None where an error names no field."""
    for ours, theirs in PARAMS.items():
        if field == ours or field.startswith(f"{ours}."):
            return theirs + field.removeprefix(ours)
    return _CALL.sub(r"\1function.", field.removeprefix("sampling.").removeprefix("chat.")) or None


def _renamed(message: str) -> str:
    return _CALL.sub(r"\1function.", _OURS.sub(lambda found: _NAMES.get(found[0], ""), message))


async def framework_error(_: Request, error: Exception) -> Response:
    """Give the form to errors of Starlette: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    words = {404: "there is no such path; docs/openai.md lists what there is", 405: "the path has other methods"}
    return HttpError(
        error.status_code, words.get(error.status_code, error.detail), headers=error.headers or {}
    ).response


async def known_error(_: Request, error: Exception) -> Response:
    """Give the form to an error that is raised before an answer began."""
    return answer_to(error).response


async def unexpected_error(request: Request, _: Exception) -> Response:
    log.error("unexpected error", request_id=request.headers.get(REQUEST_ID))  # the server logs what it is
    return UNEXPECTED.response


def answer_to(error: Exception) -> HttpError:
    """Return the answer for any error; what is unexpected tells no more than that it happened."""
    if isinstance(error, HttpError):
        return error
    return http_error(error) if isinstance(error, PacelineError) else UNEXPECTED


Handlers = Mapping[Any, Any]
HANDLERS: Handlers = {
    HTTPException: framework_error,
    HttpError: known_error,
    PacelineError: known_error,
    Exception: unexpected_error,
}
