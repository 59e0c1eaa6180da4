"""Translation of requests for text and of their outputs."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from paceline import types
from paceline.codec.filling import filled
from paceline.codec.models import values_of
from paceline.codec.sampling import (
    logprobs_from_pb,
    logprobs_to_pb,
    response_format_from_pb,
    response_format_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)
from paceline.codec.sources import (
    HOPS,
    SOURCE_TO_PB,
    hop_from_pb,
    hop_to_pb,
    source_from_pb,
    source_usage_from_pb,
    source_usage_to_pb,
)
from paceline.errors import InvalidRequest
from paceline.v1 import generation_service_pb2

_REASON_TO_PB = {
    types.FinishReason.UNSPECIFIED: generation_service_pb2.FINISH_REASON_UNSPECIFIED,
    types.FinishReason.END_TOKEN: generation_service_pb2.FINISH_REASON_END_TOKEN,
    types.FinishReason.LENGTH: generation_service_pb2.FINISH_REASON_LENGTH,
    types.FinishReason.STOP_STRING: generation_service_pb2.FINISH_REASON_STOP_STRING,
    types.FinishReason.STOP_TOKEN: generation_service_pb2.FINISH_REASON_STOP_TOKEN,
}
_REASON_FROM_PB = {pb: reason for reason, pb in _REASON_TO_PB.items()}
_CHUNK_IDS = 4096
"""Token ids read at a time; other threads may run in between."""
_PLAIN_FIELDS = (
    "max_new_tokens",
    "stop_strings",
    "stop_token_ids",
    "ignore_end_tokens",
    "max_draft_count",
    "seed",
    "completion_count",
    "top_logprob_count",
    "model_digest",
    "echo_prompt",
    "tell_rounds",
    "omit_text",
    "prompt_time_s",
)
"""Fields of a request that its message has by the same name and in the same form."""


def request_to_pb(request: types.GenerationRequest) -> generation_service_pb2.GenerateTextRequest:
    """Write a request. Raise InvalidRequest when the wire cannot carry one of its values."""
    values = {name: getattr(request, name) for name in _PLAIN_FIELDS}
    values |= _prompt_values(request.prompt) | _received_values(request.received_outputs)
    values |= _prediction_values(request.predicted_output)
    values["sampling"] = sampling_to_pb(request.sampling)
    values["drafting"] = _drafting_to_pb(request.drafting)
    values["response_format"] = response_format_to_pb(request.response_format)
    return filled(generation_service_pb2.GenerateTextRequest, values)


def _prompt_values(prompt: types.Prompt) -> dict[str, Any]:
    match prompt:
        case types.Text(value):
            return {"text": value}
        case types.UserMessage(value):
            return {"user_message": value}
        case types.TokenIds(values):
            return {"token_ids": {"values": values}}
        case types.Chat():
            return {"chat": _chat_to_pb(prompt)}
    raise InvalidRequest(f"prompt is {prompt!r}; give Text, UserMessage, Chat or TokenIds", field="prompt")


def _chat_to_pb(chat: types.Chat) -> generation_service_pb2.Chat:
    values = values_of(types.Chat, chat) | {"messages": [_chat_message_to_pb(one) for one in chat.messages]}
    return filled(generation_service_pb2.Chat, values, prefix="chat.")


def _chat_message_to_pb(message: types.ChatMessage) -> generation_service_pb2.ChatMessage:
    values = values_of(types.ChatMessage, message)
    values["tool_calls"] = [values_of(types.ToolCall, one) for one in message.tool_calls]
    return filled(generation_service_pb2.ChatMessage, values, prefix="chat.messages.")


def _chat_from_pb(message: generation_service_pb2.Chat) -> types.Chat:
    return types.Chat(
        tuple(map(_chat_message_from_pb, message.messages)), tuple(message.tools), message.template_arguments
    )


def _chat_message_from_pb(message: generation_service_pb2.ChatMessage) -> types.ChatMessage:
    calls = tuple(types.ToolCall(**values_of(types.ToolCall, one)) for one in message.tool_calls)
    return types.ChatMessage(**values_of(types.ChatMessage, message) | {"tool_calls": calls})


def _prediction_values(prediction: types.Prediction | None) -> dict[str, Any]:
    match prediction:
        case None:
            return {}
        case types.Text(value):
            return {"predicted_text": value}
        case types.TokenIds(values):
            return {"predicted_token_ids": {"values": values}}
    raise InvalidRequest(
        f"predicted_output is {prediction!r}; give Text or TokenIds, or leave it out", field="predicted_output"
    )


def _drafting_to_pb(options: types.DraftingOptions) -> generation_service_pb2.DraftingOptions | None:
    if options == types.DraftingOptions():
        return None
    values = {
        "sources": [SOURCE_TO_PB[one] for one in options.sources],
        "in_order": options.in_order,
        "forbidden_sources": [SOURCE_TO_PB[one] for one in options.forbidden_sources],
        "draft_model": options.draft_model,
    }
    return filled(generation_service_pb2.DraftingOptions, values, prefix="drafting.")


def _received_values(outputs: Sequence[types.ReceivedOutput]) -> dict[str, Any]:
    values: dict[str, Any] = {"received_token_ids": (), "received_outputs": []}
    for one in outputs:
        # Older coordinators know only this field, for output 0, and would silently make the output anew without it.
        if one.completion_index == 0 and not one.ended and not values["received_token_ids"]:
            values["received_token_ids"] = one.token_ids
        else:
            values["received_outputs"].append(values_of(types.ReceivedOutput, one))
    return values


def request_from_pb(message: generation_service_pb2.GenerateTextRequest) -> types.GenerationRequest:
    """Read a request. Raise InvalidRequest when it has no prompt."""
    return types.GenerationRequest(
        prompt=_prompt_from_pb(message),
        max_new_tokens=message.max_new_tokens if message.HasField("max_new_tokens") else None,
        stop_strings=tuple(message.stop_strings),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_end_tokens=message.ignore_end_tokens,
        max_draft_count=message.max_draft_count if message.HasField("max_draft_count") else None,
        sampling=sampling_from_pb(message.sampling),
        seed=message.seed if message.HasField("seed") else None,
        completion_count=message.completion_count or 1,
        top_logprob_count=message.top_logprob_count if message.HasField("top_logprob_count") else None,
        received_outputs=tuple(_received_from_pb(message)),
        model_digest=message.model_digest,
        drafting=_drafting_from_pb(message.drafting),
        predicted_output=_prediction_from_pb(message),
        response_format=response_format_from_pb(message),
        echo_prompt=message.echo_prompt,
        tell_rounds=message.tell_rounds,
        omit_text=message.omit_text,
        prompt_time_s=message.prompt_time_s if message.HasField("prompt_time_s") else None,
    )


def _drafting_from_pb(message: generation_service_pb2.DraftingOptions) -> types.DraftingOptions:
    return types.DraftingOptions(
        _sources_from_pb(message.sources),
        message.in_order,
        _sources_from_pb(message.forbidden_sources),
        message.draft_model,
    )


def _sources_from_pb(values: Iterable[generation_service_pb2.DraftSource.ValueType]) -> tuple[types.DraftSource, ...]:
    """Read each source once: every round looks at them, and a message may repeat one a million times."""
    return tuple(dict.fromkeys(source_from_pb(one) for one in values))


def _prediction_from_pb(message: generation_service_pb2.GenerateTextRequest) -> types.Prediction | None:
    match message.WhichOneof("predicted_output"):
        case "predicted_text":
            return types.Text(message.predicted_text)
        case "predicted_token_ids":
            return types.TokenIds(_ids_from_pb(message.predicted_token_ids.values))
    return None


def _received_from_pb(message: generation_service_pb2.GenerateTextRequest) -> Iterator[types.ReceivedOutput]:
    if message.received_token_ids:
        yield types.ReceivedOutput(0, _ids_from_pb(message.received_token_ids))
    for one in message.received_outputs:
        yield types.ReceivedOutput(one.completion_index, _ids_from_pb(one.token_ids), one.ended)


def _prompt_from_pb(message: generation_service_pb2.GenerateTextRequest) -> types.Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return types.Text(message.text)
        case "user_message":
            return types.UserMessage(message.user_message)
        case "token_ids":
            return types.TokenIds(_ids_from_pb(message.token_ids.values))
        case "chat":
            return _chat_from_pb(message.chat)
    raise InvalidRequest("prompt is missing; set text, user_message, chat or token_ids", field="prompt")


def _ids_from_pb(ids: Sequence[int]) -> tuple[int, ...]:
    chunks: Iterable[Sequence[int]] = (ids[start : start + _CHUNK_IDS] for start in range(0, len(ids), _CHUNK_IDS))
    return tuple(chain.from_iterable(chunks))


def accepted_to_pb(accepted: types.GenerationAccepted) -> generation_service_pb2.GenerateTextResponse:
    values = values_of(types.GenerationAccepted, accepted)
    return generation_service_pb2.GenerateTextResponse(accepted=generation_service_pb2.GenerationAccepted(**values))


def accepted_from_pb(message: generation_service_pb2.GenerationAccepted) -> types.GenerationAccepted:
    return types.GenerationAccepted(**values_of(types.GenerationAccepted, message))


def piece_to_pb(piece: types.OutputPiece, *, in_runs: bool = False) -> generation_service_pb2.GenerateTextResponse:
    """Write a piece; with `in_runs`, tokens without log-probabilities as runs."""
    message = generation_service_pb2.GenerateTextResponse()
    add_piece(message, piece, in_runs=in_runs)
    return message


def add_piece(message: generation_service_pb2.GenerateTextResponse, piece: types.OutputPiece, *, in_runs: bool) -> None:
    """Write a piece into an empty message, or one with the pieces of the same output before it."""
    if piece.completion_index:
        message.completion_index = piece.completion_index
    tokens = piece.tokens
    if in_runs and (isinstance(tokens, types.TokenRun) or tokens and tokens[0].logprobs is None):
        _add_runs(message.runs, tokens)
    else:
        _add_tokens(message.tokens, tokens)
    if piece.prompt_tokens:
        _add_tokens(message.prompt_tokens, piece.prompt_tokens)
    if piece.round:
        message.round.CopyFrom(_round_to_pb(piece.round))
    if piece.finish:
        usage = piece.finish.usage
        message.finish.seed = piece.finish.seed
        message.finish.reason = _REASON_TO_PB[piece.finish.reason]
        values = values_of(types.Usage, usage) | {"sources": map(source_usage_to_pb, usage.sources)}
        message.finish.usage.CopyFrom(generation_service_pb2.Usage(**values))


def _add_runs(
    messages: RepeatedCompositeFieldContainer[generation_service_pb2.TokenRun], tokens: Sequence[types.OutputToken]
) -> None:
    for run in [tokens] if isinstance(tokens, types.TokenRun) else _runs_of(tokens):
        # Field by field, and only what is set: so it takes a tenth less.
        message = messages.add()
        message.token_ids.extend(run.token_ids)
        if any(run.texts):
            message.texts.extend(run.texts)
        if run.accepted_count:
            message.accepted_count = run.accepted_count
            if run.source:
                message.source = SOURCE_TO_PB[run.source]


def _runs_of(tokens: Sequence[types.OutputToken]) -> Iterator[types.TokenRun]:
    """Yield tokens as runs, each of which ends with the first that was not drafted."""
    start = 0
    for place, token in enumerate(tokens, 1):
        if not token.accepted or place == len(tokens):
            run = tokens[start:place]
            accepted_count = len(run) - (not token.accepted)
            yield types.TokenRun(
                [one.token_id for one in run], [one.text for one in run], accepted_count, run[0].source
            )
            start = place


def _run_from_pb(run: generation_service_pb2.TokenRun) -> types.TokenRun:
    source = source_from_pb(run.source)
    return types.TokenRun(run.token_ids, run.texts, run.accepted_count, source)


def _add_tokens(
    messages: RepeatedCompositeFieldContainer[generation_service_pb2.OutputToken], tokens: Iterable[types.OutputToken]
) -> None:
    for token in tokens:
        # Made in place: a separate message would be copied, which takes twice the time.
        added = messages.add(token_id=token.token_id, text=token.text, accepted=token.accepted)
        if token.source:
            added.source = SOURCE_TO_PB[token.source]
        if token.logprobs:
            added.logprobs.CopyFrom(logprobs_to_pb(token.logprobs))
        if token.token_bytes or token.top_token_bytes:
            added.token_bytes = token.token_bytes
            added.top_token_bytes.extend(token.top_token_bytes)


def _round_to_pb(summary: types.RoundSummary) -> generation_service_pb2.RoundSummary:
    hops = {name: hop_to_pb(hop) if (hop := getattr(summary, name)) else None for name in HOPS}
    source = SOURCE_TO_PB[summary.source] if summary.source else None
    return generation_service_pb2.RoundSummary(**values_of(types.RoundSummary, summary) | hops | {"source": source})


def _round_from_pb(message: generation_service_pb2.RoundSummary) -> types.RoundSummary:
    values = values_of(types.RoundSummary, message) | {
        "source": source_from_pb(message.source) if message.source else None,
        "propose": hop_from_pb(message.propose) if message.HasField("propose") else None,
        "verify": hop_from_pb(message.verify),
    }
    return types.RoundSummary(**values)


def _token_from_pb(message: generation_service_pb2.OutputToken) -> types.OutputToken:
    logprobs = logprobs_from_pb(message.logprobs) if message.HasField("logprobs") else None
    source = source_from_pb(message.source) if message.accepted else None
    top_bytes = tuple(message.top_token_bytes) if logprobs else ()
    return types.OutputToken(
        message.token_id, message.text, message.accepted, logprobs, source, message.token_bytes, top_bytes
    )


def piece_from_pb(message: generation_service_pb2.GenerateTextResponse) -> types.OutputPiece:
    tokens = tuple(map(_token_from_pb, message.tokens)) or tuple(chain.from_iterable(map(_run_from_pb, message.runs)))
    finish = _finish_from_pb(message.finish) if message.HasField("finish") else None
    prompt_tokens = tuple(map(_token_from_pb, message.prompt_tokens))
    summary = _round_from_pb(message.round) if message.HasField("round") else None
    return types.OutputPiece(tokens, finish, message.completion_index, prompt_tokens, summary)


def _finish_from_pb(message: generation_service_pb2.GenerationFinish) -> types.GenerationFinish:
    reason = _REASON_FROM_PB.get(message.reason, types.FinishReason.UNSPECIFIED)
    lists = {
        "accepted_counts_by_position": tuple(message.usage.accepted_counts_by_position),
        "sources": tuple(map(source_usage_from_pb, message.usage.sources)),
    }
    usage = types.Usage(**values_of(types.Usage, message.usage) | lists)
    return types.GenerationFinish(reason, usage, message.seed)
