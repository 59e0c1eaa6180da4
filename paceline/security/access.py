"""What a call must show before it is read: a certificate of a certain name, a token. Knows nothing of what calls do."""

from collections.abc import Callable, Collection
from hashlib import blake2b
from pathlib import Path
from typing import Any

import grpc

from paceline.errors import PermissionDenied, Unauthenticated
from paceline.security.tokens import KnownTokens

Context = grpc.aio.ServicerContext[Any, Any]
Check = Callable[[str, Context], None]
"""Is given the method's path; raises Unauthenticated or PermissionDenied."""


def caller_names(context: Context) -> frozenset[str]:
    """Names that the caller's certificate bears: its alternative names, or else its common name; none without one."""
    shown = context.auth_context()
    names = shown.get("x509_subject_alternative_name") or shown.get("x509_common_name") or []
    return frozenset(name.decode(errors="replace") for name in names)


def caller_scope(context: Context) -> str:
    """What sets the caller's sequences apart from those of others: the same for each certificate of its names.

    Empty where callers show no certificate: then only that ids cannot be guessed keeps them apart.
    """
    names = caller_names(context)
    return blake2b(repr(sorted(names)).encode(), digest_size=16).hexdigest() + "/" if names else ""


def allowed_names(allowed: Collection[str]) -> Check:
    """Let in callers whose certificate bears one of the names."""

    def check(method: str, context: Context) -> None:
        if caller_names(context).isdisjoint(allowed):
            raise PermissionDenied("the caller's certificate bears none of the names in --tls-allowed-names")

    return check


def bearer_tokens(file: Path) -> Check:
    """Let in callers that send a token of the file as `authorization: Bearer TOKEN`."""
    known = KnownTokens(file)

    def check(method: str, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
        if scheme.lower() != "bearer" or not known.know(token.strip()):
            raise Unauthenticated("no valid token came with the call; send the metadata `authorization: Bearer TOKEN`")

    return check


def nothing_described(method: str, context: Context) -> None:
    """Let in nobody who asks what a service is and does."""
    if method.rpartition("/")[2].startswith("Describe"):
        raise PermissionDenied("descriptions are switched off here with --describe false")
