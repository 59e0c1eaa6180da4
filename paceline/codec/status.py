"""Translation between `errors` and `google.rpc.Status`.

A status carries ErrorInfo (domain `paceline`), and BadRequest or RetryInfo if the error has a field or a time.
"""

from collections.abc import Iterable
from contextlib import suppress

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from paceline import errors

DOMAIN = "paceline"
MAX_TEXT_BYTES = 1000
"""Most bytes, as UTF-8, of a message or a metadata value: both may quote a request, and gRPC may refuse trailers of
more than 8 KiB. A byte of a message takes up to 3 in the status text, where %XX stands for all but ASCII, and in base64
4/3 both beside the details and in one of them. With one metadata value as long that makes 7,000."""
FINAL_REFUSALS = ("message larger than max", "metadata size exceeds")
"""Words of gRPC itself, at either end, for what it will refuse again. Their code alone would mean to try again."""
BROKEN_STREAM = "RST_STREAM"
"""Word of gRPC itself for a stream that somebody ended without a status, such as a proxy whose other side is gone. Its
code alone would mean that the peer failed."""

_CODES = {code.value[0]: code for code in StatusCode}


def _tree(root: type[errors.PacelineError]) -> Iterable[type[errors.PacelineError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_ERROR_BY_REASON = {error.reason: error for error in _tree(errors.PacelineError)}
# For statuses without our ErrorInfo: those of gRPC itself, and of proxies in between.
_ERROR_BY_CODE: dict[StatusCode, type[errors.PacelineError]] = {
    StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    StatusCode.UNAVAILABLE: errors.PeerUnavailable,
    StatusCode.CANCELLED: errors.PeerUnavailable,
    StatusCode.DEADLINE_EXCEEDED: errors.CallTimedOut,
    StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    StatusCode.UNIMPLEMENTED: errors.MethodNotFound,
}


def error_to_pb(error: errors.PacelineError) -> status_pb2.Status:
    status = status_pb2.Status(code=error.code.value[0], message=_short(error.message))
    for detail in _details(error):
        status.details.add().Pack(detail)
    return status


def _details(error: errors.PacelineError) -> Iterable[Message]:
    metadata = {key: _short(value) for key, value in error.metadata.items()}
    yield error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    if isinstance(error, errors.InvalidRequest) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=_short(error.message))
        yield error_details_pb2.BadRequest(field_violations=[violation])
    if isinstance(error, errors.Overloaded):
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        yield error_details_pb2.RetryInfo(retry_delay=delay)


def _short(text: str) -> str:
    # Half a surrogate pair, as JSON can spell it in what an error quotes, has no form on the wire.
    content = text.encode(errors="backslashreplace")
    if len(content) <= MAX_TEXT_BYTES:
        return content.decode()
    # A character that is cut in two is left out.
    return content[: MAX_TEXT_BYTES - len("…".encode())].decode(errors="ignore") + "…"


def error_from_pb(status: status_pb2.Status) -> errors.PacelineError:
    """Read a status back into the error it was made from, or into the nearest one for its code."""
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        for message in (info, bad_request, retry):
            with suppress(DecodeError):  # a malformed detail is skipped: the code and the message say enough
                detail.Unpack(message)
    kind = _kind(status, info)
    if issubclass(kind, errors.InvalidRequest):
        field = bad_request.field_violations[0].field if bad_request.field_violations else ""
        return kind(status.message, info.metadata, field=field)
    if issubclass(kind, errors.Overloaded):
        return kind(status.message, info.metadata, retry_after_s=retry.retry_delay.ToMilliseconds() / 1000 or 1.0)
    return kind(status.message, info.metadata)


def _kind(status: status_pb2.Status, info: error_details_pb2.ErrorInfo) -> type[errors.PacelineError]:
    kind = _ERROR_BY_CODE.get(_CODES.get(status.code, StatusCode.UNKNOWN), errors.PeerFailed)
    if info.domain == DOMAIN:
        return _ERROR_BY_REASON.get(info.reason, kind)
    if kind is errors.Overloaded and any(words in status.message for words in FINAL_REFUSALS):
        return errors.MessageTooLarge
    if kind is errors.PeerFailed and BROKEN_STREAM in status.message:
        return errors.PeerUnavailable
    return kind
