"""Translation of sampling parameters, choice rules and log-probabilities."""

from paceline import types
from paceline.codec.filling import filled
from paceline.v1 import common_pb2


def sampling_to_pb(sampling: types.SamplingParameters) -> common_pb2.SamplingParameters:
    """Write sampling parameters. Raise InvalidRequest when the wire cannot carry one of the values."""
    values = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "logit_bias": [{"token_id": token_id, "bias": bias} for token_id, bias in sampling.logit_bias],
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_new_tokens": sampling.min_new_tokens,
    }
    return filled(common_pb2.SamplingParameters, values, prefix="sampling.")


def sampling_from_pb(message: common_pb2.SamplingParameters) -> types.SamplingParameters:
    return types.SamplingParameters(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        logit_bias=tuple((one.token_id, one.bias) for one in message.logit_bias),
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        min_new_tokens=message.min_new_tokens,
    )


def rule_to_pb(rule: types.ChoiceRule) -> common_pb2.ChoiceRule:
    """Write a rule; greedy decoding is an empty message."""
    if rule == types.GREEDY:
        return common_pb2.ChoiceRule()
    return common_pb2.ChoiceRule(
        sampling=sampling_to_pb(rule.sampling),
        seed=rule.seed,
        prompt_count=rule.prompt_count,
        end_token_ids=rule.end_token_ids,
    )


def rule_from_pb(message: common_pb2.ChoiceRule) -> types.ChoiceRule:
    return types.ChoiceRule(
        sampling=sampling_from_pb(message.sampling),
        seed=message.seed,
        prompt_count=message.prompt_count,
        end_token_ids=tuple(message.end_token_ids),
    )


def logprobs_to_pb(logprobs: types.TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[common_pb2.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top],
    )


def logprobs_from_pb(message: common_pb2.TokenLogprobs) -> types.TokenLogprobs:
    return types.TokenLogprobs(message.logprob, tuple((one.token_id, one.logprob) for one in message.top))
