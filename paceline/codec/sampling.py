"""Translation of sampling parameters, choice rules and log-probabilities."""

from dataclasses import fields
from typing import Any

from paceline import types
from paceline.codec.filling import filled
from paceline.errors import InvalidRequest
from paceline.v1 import common_pb2, generation_service_pb2


def sampling_to_pb(sampling: types.SamplingParameters) -> common_pb2.SamplingParameters:
    """Write sampling parameters. Raise InvalidRequest when the wire cannot carry one of the values."""
    values = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    values["logit_bias"] = [{"token_id": token_id, "bias": bias} for token_id, bias in sampling.logit_bias]
    return filled(common_pb2.SamplingParameters, values, prefix="sampling.")


def sampling_from_pb(message: common_pb2.SamplingParameters) -> types.SamplingParameters:
    """What is unset is as `SamplingParameters` has it: a field whose default is not 0 must tell whether it is set."""
    values: dict[str, Any] = {one.name: value for one, value in message.ListFields()}
    values["logit_bias"] = tuple((one.token_id, one.bias) for one in message.logit_bias)
    return types.SamplingParameters(**values)


def rule_to_pb(rule: types.ChoiceRule) -> common_pb2.ChoiceRule:
    """Write a rule; greedy decoding is an empty message."""
    if rule == types.GREEDY:
        return common_pb2.ChoiceRule()
    return common_pb2.ChoiceRule(
        sampling=sampling_to_pb(rule.sampling),
        seed=rule.seed,
        prompt_count=rule.prompt_count,
        end_token_ids=rule.end_token_ids,
        response_format=response_format_to_pb(rule.response_format),
    )


def rule_from_pb(message: common_pb2.ChoiceRule) -> types.ChoiceRule:
    return types.ChoiceRule(
        sampling=sampling_from_pb(message.sampling),
        seed=message.seed,
        prompt_count=message.prompt_count,
        end_token_ids=tuple(message.end_token_ids),
        response_format=response_format_from_pb(message),
    )


def response_format_to_pb(form: types.ResponseFormat | None) -> common_pb2.ResponseFormat | None:
    """Write a format. Raise InvalidRequest unless exactly one of its forms is set, in whole characters."""
    if form is None:
        return None
    values = {one.name: getattr(form, one.name) for one in fields(form) if getattr(form, one.name)}
    if len(values) != 1:
        raise InvalidRequest(
            f"response_format sets {' and '.join(values) or 'nothing'}; set one of json_schema, regex and grammar",
            field="response_format",
        )
    return filled(common_pb2.ResponseFormat, values, prefix="response_format.")


def response_format_from_pb(
    message: common_pb2.ChoiceRule | generation_service_pb2.GenerateTextRequest,
) -> types.ResponseFormat | None:
    """Read the format of a message; None: it has none."""
    if not message.HasField("response_format"):
        return None
    name = message.response_format.WhichOneof("format")
    # A form that this version does not know must not be taken for none.
    values = {name: getattr(message.response_format, name)} if name else {}
    return types.ResponseFormat(**values)


def logprobs_to_pb(logprobs: types.TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[common_pb2.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top],
    )


def logprobs_from_pb(message: common_pb2.TokenLogprobs) -> types.TokenLogprobs:
    return types.TokenLogprobs(message.logprob, tuple((one.token_id, one.logprob) for one in message.top))
