"""Checks of a caller's certificate name and token, made before a request is read. Knows nothing of what calls do."""

from collections.abc import Callable, Collection
from hashlib import blake2b
from pathlib import Path
from typing import Any

import grpc

from paceline.errors import NotDescribed, PermissionDenied, Unauthenticated
from paceline.scope import EQUAL, Caller, Weights
from paceline.security.tokens import KnownTokens

Context = grpc.aio.ServicerContext[Any, Any]
Check = Callable[[str, Context], None]
"""Takes the method's path and the call's context; raises Unauthenticated or PermissionDenied."""


def caller_names(context: Context) -> frozenset[str]:
    """Return the alternative names of the caller's certificate, or else its common name; empty without one."""
    shown = context.auth_context()
    names = shown.get("x509_subject_alternative_name") or shown.get("x509_common_name") or []
    return frozenset(name.decode(errors="replace") for name in names)


def caller_scope(context: Context) -> str:
    """Return the prefix that keeps the caller's sequences apart from others'; certificates of the same names share it.

    It is empty without a certificate. Only unguessable ids keep such callers' sequences apart.
    """
    names = caller_names(context)
    return blake2b(repr(sorted(names)).encode(), digest_size=16).hexdigest() + "/" if names else ""


def caller_of(context: Context, weights: Weights = EQUAL) -> Caller:
    """Return the caller. It is told from others by its connection: coordinators may bear the same certificate."""
    scope = caller_scope(context)
    weight = max((weights[name] for name in caller_names(context) if name in weights), default=1.0)
    return Caller(f"{scope}{context.peer()}", scope, weight)


def allowed_names(allowed: Collection[str]) -> Check:
    """Return a check that lets in callers whose certificate bears one of the names."""

    def check(method: str, context: Context) -> None:
        if caller_names(context).isdisjoint(allowed):
            raise PermissionDenied("the caller's certificate bears none of the names in --tls-allowed-names")

    return check


def bearer_tokens(file: Path) -> Check:
    """Return a check that lets in callers that send a token of the file as `authorization: Bearer TOKEN`."""
    known = KnownTokens(file)

    def check(method: str, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        if not known.admit(str(metadata.get("authorization", ""))):
            raise Unauthenticated("no valid token came with the call; send the metadata `authorization: Bearer TOKEN`")

    return check


def nothing_described(method: str, context: Context) -> None:
    """Refuse every call that asks for a description of the service."""
    if method.rpartition("/")[2].startswith("Describe"):
        raise NotDescribed("descriptions are switched off here with --describe false")
