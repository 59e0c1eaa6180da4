"""What model services have to be for this coordinator, and the wait for the first of them."""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from coordinator.replica import Replica
from coordinator.replicas import RemoteT, Replicas
from paceline.errors import IncompatiblePair, PeerUnavailable, StartupError
from paceline.rpc.peers import speaks_tls
from paceline.text import TextCodec, check_same_tokenizer
from paceline.types import ModelDescription, ReplicaState

log = structlog.get_logger()

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SAME = "start all with the same model and settings"


@dataclass(frozen=True)
class Served:
    """What clients are served with."""

    target: ModelDescription
    """As the first target replica described it; the others must be like it."""
    text: TextCodec | None
    """None when the models have no tokenizer: then only token ids can pass."""


class Fit:
    """What replicas are measured by: the first target that answered."""

    def __init__(self) -> None:
        self._target: ModelDescription | None = None
        self._other_kernels: set[str] = set()

    def check_target(self, model: ModelDescription) -> None:
        """Raise IncompatiblePair unless the model gives the same output as the first target."""
        first = self._target = self._target or model
        check_same_model(model, first)
        if model.longest_sequence < first.longest_sequence:
            raise IncompatiblePair(
                f"a target replica takes sequences of {model.longest_sequence} tokens, and the first one "
                f"{first.longest_sequence}: what was accepted could not go on there; give it as much --kv-memory"
            )

        if model.kernels != first.kernels and model.kernels not in self._other_kernels:
            self._other_kernels.add(model.kernels)
            log.warning(
                "a target replica computes with other kernels than the first: an output that goes on there may be "
                "rounded otherwise, which decides between close logits; strict numerics refuse that",
                kernels=model.kernels,
                first=first.kernels,
            )

    def check_draft(self, model: ModelDescription) -> None:
        """Raise IncompatiblePair unless the model can draft for the first target."""
        assert self._target
        check_pair(model, self._target)


async def wait_for_target(
    targets: Replicas[RemoteT], *, addresses: str, timeout_s: float, encrypted: bool = False
) -> Replica[RemoteT]:
    """Return the first replica that is up. Raises StartupError, saying why there is none or why one is refused.

    `encrypted`: the replicas are called over TLS.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await targets.looked()
            if not targets.up:
                log.info("waiting for the target service", address=addresses, timeout_s=timeout_s)
            return await targets.wait_until_up()
    except TimeoutError as error:
        reasons = "; ".join([await _reason(one, encrypted) for one in targets.all])
        raise StartupError(
            f"the target service at {addresses} did not answer within {timeout_s:g} s; start it, or correct --target "
            f"({reasons or 'its name cannot be resolved'})"
        ) from error


async def _reason(replica: Replica[RemoteT], encrypted: bool) -> str:
    return f"{replica.address}: {await _state(replica, encrypted)}"


async def _state(replica: Replica[RemoteT], encrypted: bool) -> str:
    if replica.state is ReplicaState.DRAINING:
        return "it answers that it is not serving"
    error = replica.error
    if error is None:
        return "it has not answered yet"
    if not encrypted and isinstance(error, PeerUnavailable) and await speaks_tls(replica.address):
        return "it wants TLS; give the CA of its certificate with --models-ca"
    return error.message


def check_same_model(model: ModelDescription, first: ModelDescription) -> None:
    """Raise IncompatiblePair where outputs would not be the same; names count for services without a digest only."""
    fields: Iterable[str] = ("model_id", "tokenizer_fingerprint", "vocabulary_size", "dtype", "numerics")
    if model.weights_digest and first.weights_digest:
        fields = first.decides_output
    for field in fields:
        own, wanted = getattr(model, field), getattr(first, field)
        if own != wanted:
            raise IncompatiblePair(
                f"a target replica ({model.model_id}) has {field} {_short(own)!r}, and the first one "
                f"({first.model_id}) {_short(wanted)!r}: outputs would depend on which one serves a request; "
                f"{'start all with --numerics fast, or on one kind of machine' if field == 'kernels' else _SAME}"
            )


def _short(value: object) -> object:
    """The first digits of a digest."""
    return value[:12] if isinstance(value, str) and _DIGEST.fullmatch(value) else value


def check_pair(draft: ModelDescription, target: ModelDescription) -> None:
    """Raise IncompatiblePair unless every token id means the same text to both models."""
    check_same_tokenizer(draft.model_id, draft.tokenizer_fingerprint, target.model_id, target.tokenizer_fingerprint)
    if not target.tokenizer_fingerprint and draft.vocabulary_size != target.vocabulary_size:
        raise IncompatiblePair(
            f"draft {draft.model_id!r} and target {target.model_id!r} have no tokenizer to compare, and their "
            f"vocabularies differ: {draft.vocabulary_size} and {target.vocabulary_size} tokens"
        )
