"""Join the two model services: wait for them, see that they can work as a pair, fetch the tokenizer."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

import structlog

from coordinator.clients import RemoteDrafter, RemoteVerifier
from paceline.errors import IncompatiblePair, PacelineError, PeerUnavailable, StartupError
from paceline.text import TextCodec, check_same_tokenizer
from paceline.types import ModelDescription

log = structlog.get_logger()

FIRST_ATTEMPT_S = 5.0


@dataclass(frozen=True)
class Pair:
    draft: ModelDescription
    target: ModelDescription
    text: TextCodec | None
    """None when the models have no tokenizer: then only token ids can pass."""


class Describes(Protocol):
    def describe(self, timeout_s: float, *, wait_for_ready: bool = False) -> Awaitable[ModelDescription]: ...


async def join_pair(
    drafter: RemoteDrafter, verifier: RemoteVerifier, *, draft_address: str, target_address: str, timeout_s: float
) -> Pair:
    """Wait for both services and check the pair. Raises StartupError or IncompatiblePair, saying why."""
    target = await _describe(verifier, "target", target_address, timeout_s)
    draft = await _describe(drafter, "draft", draft_address, timeout_s)
    check_pair(draft, target)
    files = await verifier.download_tokenizer()
    log.info("joined", target=target.model_id, draft=draft.model_id)
    return Pair(draft, target, TextCodec(files) if files else None)


async def _describe(service: Describes, role: str, address: str, timeout_s: float) -> ModelDescription:
    try:
        try:
            return await service.describe(min(FIRST_ATTEMPT_S, timeout_s))
        except PeerUnavailable:
            log.info(f"waiting for the {role} service", address=address, timeout_s=timeout_s)
            return await service.describe(timeout_s, wait_for_ready=True)
    except PacelineError as error:
        raise StartupError(
            f"the {role} service at {address} did not answer within {timeout_s:g} s; start it, or correct --{role} "
            f"({error.message})"
        ) from error


def check_pair(draft: ModelDescription, target: ModelDescription) -> None:
    """Raise IncompatiblePair unless every token id means the same text to both models."""
    check_same_tokenizer(draft.model_id, draft.tokenizer_fingerprint, target.model_id, target.tokenizer_fingerprint)
    if not target.tokenizer_fingerprint and draft.vocabulary_size != target.vocabulary_size:
        raise IncompatiblePair(
            f"draft {draft.model_id!r} and target {target.model_id!r} have no tokenizer to compare, and their "
            f"vocabularies differ: {draft.vocabulary_size} and {target.vocabulary_size} tokens"
        )
