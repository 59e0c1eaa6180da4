"""The served model, and the checks that other models pass to serve beside it. Knows nothing of replicas."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import IncompatiblePair
from paceline.grammars import Grammars
from paceline.text import TextCodec, check_same_tokenizer
from paceline.types import ModelDescription, TokenizerFiles

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SAME = "start all with the same model and settings; a new one is taken over when no target of the old one is left"


@dataclass(frozen=True)
class Served:
    """A model that is served. The same model with other limits is another `Served`."""

    target: ModelDescription
    """Description by the first target; other targets must be like it."""
    text: TextCodec | None = None
    """Tokenizer; None when the models have none: then only token ids can pass."""
    grammars: Grammars | None = None
    """What checks formats of outputs; None without a tokenizer."""


def read_served(target: ModelDescription, files: TokenizerFiles | None) -> Served:
    """Return the model with its tokenizer: a large one takes seconds. Raise ModelNotUsable when it cannot be read."""
    if files is None:
        return Served(target)
    text = TextCodec(files)
    return Served(target, text, Grammars(text.tokenizer))


def named(model: ModelDescription) -> str:
    """Name a model for people, so that two models of one name are told apart."""
    digest = model.identity.model_digest
    return f"{model.model_id} with digest {digest[:12]!r}" if digest else model.model_id


def differing_field(model: ModelDescription, served: ModelDescription) -> str | None:
    """Return a field that makes outputs differ; None if there is none. Names count only without weights digests."""
    fields: Iterable[str] = (
        "model_id",
        "tokenizer_fingerprint",
        "vocabulary_size",
        "dtype",
        "quantization",
        "numerics",
    )
    if model.weights_digest and served.weights_digest:
        fields = served.decides_output
    return next((field for field in fields if getattr(model, field) != getattr(served, field)), None)


def check_same_model(model: ModelDescription, served: ModelDescription) -> None:
    """Raise IncompatiblePair when outputs would differ."""
    if field := differing_field(model, served):
        own, wanted = _short(getattr(model, field)), _short(getattr(served, field))
        raise IncompatiblePair(
            f"a target replica ({model.model_id}) has {field} {own!r}, and what is served ({served.model_id}) "
            f"{wanted!r}: outputs would depend on which one serves a request; "
            f"{'start all with --numerics fast, or on one kind of machine' if field == 'kernels' else _SAME}"
        )


def _short(value: object) -> object:
    """Shorten a digest to its first digits."""
    return value[:12] if isinstance(value, str) and _DIGEST.fullmatch(value) else value


def check_pair(draft: ModelDescription, target: ModelDescription) -> None:
    """Raise IncompatiblePair unless the token ids mean the same text to both models."""
    check_same_tokenizer(draft.model_id, draft.tokenizer_fingerprint, target.model_id, target.tokenizer_fingerprint)
    if not target.tokenizer_fingerprint and draft.vocabulary_size != target.vocabulary_size:
        raise IncompatiblePair(
            f"draft {draft.model_id!r} and target {target.model_id!r} have no tokenizer to compare, and their "
            f"vocabularies differ: {draft.vocabulary_size} and {target.vocabulary_size} tokens"
        )
