"""Log-probabilities in the two forms that OpenAI has."""

from collections.abc import Iterable, Sequence

from paceline.gateway.bodies import Json
from paceline.types import OutputToken

LEAST = -9999.0
"""Stands for a log-probability that JSON cannot hold."""


def chat_logprobs(tokens: Iterable[OutputToken]) -> Json:
    return {"content": [_entry(one) for one in tokens], "refusal": None}


def _entry(token: OutputToken) -> Json:
    found = token.logprobs
    top = zip(token.top_token_bytes, found.top, strict=False) if found else ()
    return {
        **_named(token.token_bytes, found.logprob if found else LEAST),
        "top_logprobs": [_named(content, logprob) for content, (_, logprob) in top],
    }


def _named(content: bytes, logprob: float) -> Json:
    return {"token": content.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(content)}


def completion_logprobs(tokens: Sequence[OutputToken], offset: int) -> Json:
    """Return the lists of a completion's tokens, of which the first begins at character `offset` of its text."""
    offsets = []
    for one in tokens:
        offsets.append(offset)
        offset += len(one.text)
    return {
        "text_offset": offsets,
        "tokens": [_words(one.token_bytes) for one in tokens],
        # The first token of a prompt follows none, so it has no probability.
        "token_logprobs": [_finite(one.logprobs.logprob) if one.logprobs else None for one in tokens],
        "top_logprobs": [_top(one) for one in tokens],
    }


def _top(token: OutputToken) -> dict[str, float] | None:
    if not token.logprobs:
        return None
    found = {_words(token.token_bytes): _finite(token.logprobs.logprob)}
    for content, (_, logprob) in zip(token.top_token_bytes, token.logprobs.top, strict=False):
        found.setdefault(_words(content), _finite(logprob))
    return found


def _words(content: bytes) -> str:
    """Return a token's text; `bytes:` and its bytes, as OpenAI has it, for a part of a character."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{one:02x}" for one in content)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
