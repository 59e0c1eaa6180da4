"""What sampling parameters may be: the coordinator and both model services refuse the same in the same words."""

import math
from collections.abc import Collection

from paceline.checks import check_token_ids
from paceline.errors import InvalidRequest
from paceline.types import ChoiceRule, SamplingParameters

MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 0.001
"""Least that is not 0: logits over less would leave the range of float32."""
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_BIAS = 1000.0


def check_sampling(sampling: SamplingParameters, vocabulary_size: int) -> None:
    """Raise InvalidRequest, naming the field, its value and what it may be."""
    if sampling.temperature != 0:
        _check_range("temperature", sampling.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, instead="0, or ")
    _check_range("top_k", sampling.top_k, 0, math.inf)
    _check_range("top_p", sampling.top_p, 0, 1, above=True)
    _check_range("min_p", sampling.min_p, 0, 1)
    _check_range("repetition_penalty", sampling.repetition_penalty, MIN_REPETITION_PENALTY, MAX_PENALTY)
    _check_range("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("min_new_tokens", sampling.min_new_tokens, 0, math.inf)
    token_ids = [token_id for token_id, _ in sampling.logit_bias]
    if len(token_ids) > MAX_LOGIT_BIASES:
        raise _refusal("logit_bias", f"has {len(token_ids)} entries; give {MAX_LOGIT_BIASES} at most")
    if len(set(token_ids)) < len(token_ids):
        raise _refusal("logit_bias", "names a token twice; name each once")
    check_token_ids(token_ids, vocabulary_size, "sampling.logit_bias")
    for _, bias in sampling.logit_bias:
        _check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)


def check_rule(rule: ChoiceRule, vocabulary_size: int) -> None:
    """As `check_sampling`, and the same for the rest of what a choice depends on."""
    check_sampling(rule.sampling, vocabulary_size)
    if rule.prompt_count < 0:
        raise InvalidRequest(f"prompt_count is {rule.prompt_count}; it cannot be negative", field="rule.prompt_count")
    check_token_ids(rule.end_token_ids, vocabulary_size, "rule.end_token_ids")
    check_min_new_tokens(rule.sampling, set(rule.end_token_ids), vocabulary_size)


def check_min_new_tokens(sampling: SamplingParameters, end_token_ids: Collection[int], vocabulary_size: int) -> None:
    """Raise InvalidRequest when `min_new_tokens` would leave no token to choose. Each end token is given once."""
    if sampling.min_new_tokens and len(end_token_ids) >= vocabulary_size:
        raise _refusal(
            "min_new_tokens",
            f"is {sampling.min_new_tokens}, but every token of the vocabulary ends the output; drop it",
        )


def check_top_logprob_count(count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprob_count is {count}; give 0 to {MAX_TOP_LOGPROBS}, or leave it out", field="top_logprob_count"
        )


def _check_range(field: str, value: float, low: float, high: float, *, above: bool = False, instead: str = "") -> None:
    """`above`: the lowest value itself is too low. Not a number is never in range. `instead`: what may be given too."""
    if not (low <= value <= high) or (above and value == low):
        lowest = f"above {low:g}" if above else f"at least {low:g}"
        highest = "" if high == math.inf else f" and at most {high:g}"
        raise _refusal(field, f"is {value:g}; give {instead}{lowest}{highest}")


def _refusal(field: str, words: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {words}", field=f"sampling.{field}")
