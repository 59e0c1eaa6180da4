"""What clients are served with, and what models have to be like to serve them. Knows nothing of replicas."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import IncompatiblePair
from paceline.text import TextCodec, check_same_tokenizer
from paceline.types import ModelDescription

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SAME = "start all with the same model and settings; a new one is taken over when no target of the old one is left"


@dataclass(frozen=True)
class Served:
    """One model, from when it is served on; with other limits it is another."""

    target: ModelDescription
    """As the target described it that was there first; others must be like it."""
    text: TextCodec | None
    """None when the models have no tokenizer: then only token ids can pass."""


def named(model: ModelDescription) -> str:
    """Name a model to people, so that two of one name are told apart."""
    digest = model.identity.model_digest
    return f"{model.model_id} with digest {digest[:12]!r}" if digest else model.model_id


def differing_field(model: ModelDescription, served: ModelDescription) -> str | None:
    """Return what makes outputs differ, None where nothing does. Names count for services without a digest only."""
    fields: Iterable[str] = ("model_id", "tokenizer_fingerprint", "vocabulary_size", "dtype", "numerics")
    if model.weights_digest and served.weights_digest:
        fields = served.decides_output
    return next((field for field in fields if getattr(model, field) != getattr(served, field)), None)


def check_same_model(model: ModelDescription, served: ModelDescription) -> None:
    """Raise IncompatiblePair where outputs would not be the same."""
    if field := differing_field(model, served):
        own, wanted = _short(getattr(model, field)), _short(getattr(served, field))
        raise IncompatiblePair(
            f"a target replica ({model.model_id}) has {field} {own!r}, and what is served ({served.model_id}) "
            f"{wanted!r}: outputs would depend on which one serves a request; "
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
