"""Every error that Paceline raises on purpose.

    PacelineError
      InvalidRequest           INVALID_ARGUMENT      a field is wrong; repeating the call is useless
        PromptTooLong                                a prompt leaves no room for the output that is asked for
        DuplicateSequence                            a call names a sequence twice
      SequenceNotFound         NOT_FOUND             a rollback names a sequence the service does not hold
      TokenizerNotFound        NOT_FOUND             the model has no tokenizer
      Unauthenticated          UNAUTHENTICATED       the caller showed no token, or a wrong one
      PermissionDenied         PERMISSION_DENIED     the caller is known and may not do this
        NotDescribed                                 the service describes itself to nobody, and answers other calls
      PrefixNotCached          FAILED_PRECONDITION   fewer tokens are cached than a row relies on: send them all
        RuleUnknown                                  the sequence's choice rule is unknown: send it with all tokens
      ModelChanged             FAILED_PRECONDITION   the received tokens are from another model than the one served now
      MessageTooLarge          RESOURCE_EXHAUSTED    a message exceeds a limit; repeating the call is useless
      Overloaded               RESOURCE_EXHAUSTED    no room now; try again after `retry_after_s`
        CacheFull                                    other sequences leave no room for a row's tokens
      PeerUnavailable          UNAVAILABLE           a service cannot be reached
        SharedStreamLost                             a message too large for a stream ended it, nobody knows whose
      CallTimedOut             DEADLINE_EXCEEDED     a call did not end in time
      NoChoice                 INTERNAL              a model's logits leave no token to choose: its row fails alone
      PeerFailed               INTERNAL              a service failed in a way it did not explain
        WrongAnswer                                  its answer cannot be parsed, or cannot be true
      MethodNotFound           UNIMPLEMENTED         the peer is another service or has another version
      StartupError             FAILED_PRECONDITION   a service cannot start as configured
        ModelNotUsable                               a checkpoint is missing, broken or unsupported
        IncompatiblePair                             draft and target cannot work together
        AddressInUse                                 the port is taken

Servicers raise these errors. `wire` and `codec` turn them into canonical statuses and, in clients, back into errors.
Messages name the field, the value and the remedy.
"""

from collections.abc import Mapping
from typing import ClassVar, TypeVar

import grpc

Metadata = Mapping[str, str]

MOST_DIGITS = 18
"""Of a count of bytes; Python refuses to read numbers of thousands of digits."""


class PacelineError(Exception):
    """Base of all errors. A peer sees `code` and `reason` besides the message."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, metadata: Metadata | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})


ErrorT = TypeVar("ErrorT", bound=Exception)


def as_result(error: ErrorT) -> ErrorT:
    """Return an error that is kept, such as a row's or a call's result, without the frames that it came through.

    Frames know their callers and all that these have computed. A result that knows them holds itself, and with it a
    call's message and tensors, until the garbage collector comes.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


class InvalidRequest(PacelineError):
    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, message: str, metadata: Metadata | None = None, *, field: str = "") -> None:
        super().__init__(message, metadata)
        self.field = field


class PromptTooLong(InvalidRequest):
    reason = "PROMPT_TOO_LONG"


class DuplicateSequence(InvalidRequest):
    reason = "DUPLICATE_SEQUENCE"


class SequenceNotFound(PacelineError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "SEQUENCE_NOT_FOUND"


class TokenizerNotFound(PacelineError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "TOKENIZER_NOT_FOUND"


class PrefixNotCached(PacelineError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "PREFIX_NOT_CACHED"


class RuleUnknown(PrefixNotCached):
    reason = "RULE_UNKNOWN"


class ModelChanged(PacelineError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "MODEL_CHANGED"


class Unauthenticated(PacelineError):
    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(PacelineError):
    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class NotDescribed(PermissionDenied):
    reason = "NOT_DESCRIBED"


class MessageTooLarge(PacelineError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "MESSAGE_TOO_LARGE"


class Overloaded(PacelineError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"

    def __init__(self, message: str, metadata: Metadata | None = None, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, metadata)
        self.retry_after_s = retry_after_s


class CacheFull(Overloaded):
    reason = "CACHE_FULL"

    @property
    def missing_bytes(self) -> int:
        """Bytes that other sequences would have to free for the row; 0 when unknown."""
        told = self.metadata.get("missing_bytes", "")
        return int(told) if told.isdecimal() and len(told) <= MOST_DIGITS else 0

    @property
    def gave_cache_up(self) -> bool:
        """Whether nothing of the row's sequence is cached any more, because an older one needed the room."""
        return self.metadata.get("cached_length") == "0"


class PeerUnavailable(PacelineError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "PEER_UNAVAILABLE"


class SharedStreamLost(PeerUnavailable):
    reason = "SHARED_STREAM_LOST"


class CallTimedOut(PacelineError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "CALL_TIMED_OUT"


class NoChoice(PacelineError):
    code = grpc.StatusCode.INTERNAL
    reason = "NO_CHOICE"


class PeerFailed(PacelineError):
    code = grpc.StatusCode.INTERNAL
    reason = "PEER_FAILED"


class WrongAnswer(PeerFailed):
    reason = "WRONG_ANSWER"


class MethodNotFound(PacelineError):
    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "METHOD_NOT_FOUND"


class StartupError(PacelineError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STARTUP_FAILED"


class ModelNotUsable(StartupError):
    reason = "MODEL_NOT_USABLE"


class IncompatiblePair(StartupError):
    reason = "INCOMPATIBLE_PAIR"


class AddressInUse(StartupError):
    reason = "ADDRESS_IN_USE"
